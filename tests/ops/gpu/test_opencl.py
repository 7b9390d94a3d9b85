# SPDX-License-Identifier: Apache-2.0
"""The parts below kernels: the loader, errors, compiled kernels on disk."""

import ctypes.util
import os

import numpy as np
import pytest

from tests.ops.device import testing

gpu = testing.gpu
KERNEL = "args.y.Write({}.0f, 0);"


def one_number(context, number):
    """Runs a kernel that writes this number; each number is a kernel of its own."""
    y = np.zeros(1, np.float32)
    context.run(gpu.Kernel(KERNEL.format(number), [gpu.Tensor("y", "float", [1], written=True)]), [1, 1, 1], [y])
    return y[0]


# --- Errors -----------------------------------------------------------------------------------------------------------


def test_error_names_call_code_and_remedy():
    with pytest.raises(RuntimeError) as raised:
        gpu.check(-4, "clCreateBuffer", "a buffer of 8 bytes", "")
    assert str(raised.value) == (
        "[FlowNPU] device 'gpu': a buffer of 8 bytes: clCreateBuffer ended with CL_MEM_OBJECT_ALLOCATION_FAILURE (-4); "
        "use smaller inputs, or close other programs that use the GPU"
    )


def test_success_is_no_error():
    gpu.check(0, "clFinish", "waiting", "")


def test_error_codes_have_advice():
    for code in range(-70, 0):
        with pytest.raises(RuntimeError, match=rf"\({code}\): the log; .{{20}}"):
            gpu.check(code, "clFinish", "waiting", "the log")


@pytest.mark.opencl
def test_error_codes_have_interface_names():
    """Against pyopencl's, which has them from OpenCL's headers."""
    codes = pytest.importorskip("pyopencl", reason="pyopencl has the names").status_code
    named = {getattr(codes, name): f"CL_{name}" for name in dir(codes) if isinstance(getattr(codes, name), int)}
    ours = {code: gpu.name_of_code(code) for code in named if gpu.name_of_code(code).startswith("CL_")}
    assert len(ours) > 30
    assert ours.items() <= named.items()


@pytest.mark.opencl
def test_constants_equal_interface_numbers():
    """Against pyopencl's, which has them from OpenCL's headers."""
    cl = pytest.importorskip("pyopencl", reason="pyopencl has the numbers")
    for name, number in gpu.constants().items():
        kind, member = name.split(".")
        assert getattr(getattr(cl, kind), member) == number, name


# --- The loader -------------------------------------------------------------------------------------------------------


def test_missing_loader_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match=r"expected an OpenCL loader in .*/none.so .*set FLOWNPU_OPENCL"):
        gpu.load(str(tmp_path / "none.so"))


def test_library_without_opencl_is_refused():
    library = ctypes.util.find_library("m")
    assert library is not None
    with pytest.raises(RuntimeError, match=r"its loader libm\S* has no clGetPlatformIDs; `flownpu doctor`"):
        gpu.load(library)


# --- On PoCL ----------------------------------------------------------------------------------------------------------


@pytest.mark.opencl
def test_unknown_device_is_refused(pocl):
    del pocl
    with pytest.raises(RuntimeError, match=r"opencl_device to be a part of one of '.*Portable.*', got 'Radeon 999'"):
        gpu.open("Radeon 999")


@pytest.mark.opencl
def test_compiled_kernels_are_kept(pocl, tmp_path):
    del pocl
    first = gpu.open(cache=str(tmp_path))
    assert [one_number(first, 1), one_number(first, 1), one_number(first, 2)] == [1, 1, 2]
    assert (first.compiled, first.from_cache) == (2, 0)
    second = gpu.open(cache=str(tmp_path))
    assert [one_number(second, 1), one_number(second, 2)] == [1, 2]
    assert (second.compiled, second.from_cache) == (0, 2)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".bin", ".bin"]


@pytest.mark.opencl
def test_damaged_files_are_compiled_anew(pocl, tmp_path):
    """A changed byte, a file cut short, an empty file, and another kernel's file under this name."""
    del pocl
    one_number(gpu.open(cache=str(tmp_path)), 1)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    one_number(gpu.open(cache=str(tmp_path / "other")), 2)
    (other,) = (tmp_path / "other").iterdir()
    changed = bytearray(whole)
    changed[-9] ^= 1
    for content in (bytes(changed), whole[:-1], b"", other.read_bytes()):
        file.write_bytes(content)
        context = gpu.open(cache=str(tmp_path))
        assert one_number(context, 1) == 1
        assert (context.compiled, context.from_cache) == (1, 0)
        mended = gpu.open(cache=str(tmp_path))
        assert one_number(mended, 1) == 1
        assert (mended.compiled, mended.from_cache) == (0, 1)


@pytest.mark.opencl
def test_unwritable_cache_folder_is_reported_and_kernels_run(pocl, tmp_path):
    """Kernels run, and the context says why they are not kept."""
    del pocl
    (tmp_path / "file").write_text("")
    context = gpu.open(cache=str(tmp_path / "file" / "folder"))
    assert one_number(context, 3) == 3
    assert "could not write" in context.cache_problem


@pytest.mark.opencl
def test_empty_cache_folder_keeps_nothing(pocl):
    del pocl
    context = gpu.open(cache="")
    assert one_number(context, 4) == 4
    assert context.cache_problem == ""


@pytest.mark.opencl
def test_kernel_that_does_not_compile_quotes_compiler(pocl):
    """The error quotes the compiler."""
    del pocl
    with pytest.raises(RuntimeError, match=r"(?s)kernel tried on .*CL_BUILD_PROGRAM_FAILURE.*no_such_word.*selftest"):
        gpu.open().run(gpu.Kernel("no_such_word;", []), [1, 1, 1], [])


@pytest.mark.opencl
def test_impossible_allocation_is_refused(pocl):
    del pocl
    beyond = 2**50 if os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 2**50 else 2**62
    with pytest.raises(RuntimeError, match=rf"a buffer of {beyond} bytes .*clCreateBuffer ended with CL_\w+"):
        gpu.open().allocate(beyond)
