# SPDX-License-Identifier: Apache-2.0
"""The emulated NPU as a device of ONNX Runtime, for programs that choose devices by their type."""

import subprocess
import sys
import textwrap
from pathlib import Path


def run(library: Path, body: str) -> list[str]:
    """The words that a script prints, run in a process of its own, since registrations are per process."""
    head = f"""
        import onnxruntime
        LIBRARY = {str(library)!r}
        NAME = "FlowNPUExecutionProvider"
        def ours(): return [device for device in onnxruntime.get_ep_devices() if device.ep_name == NAME]
    """
    script = textwrap.dedent(head) + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_virtual_device_is_offered_on_registration(library: Path) -> None:
    body = """
        onnxruntime.register_execution_provider_library(NAME + ".virtual", LIBRARY)
        for device in ours():
            print(device.device.type.name, hex(device.device.vendor_id), device.ep_options)
    """
    assert run(library, body) == ["NPU", "0x1022", "{'device':", "'emulate'}"]


def test_virtual_device_comes_beside_processor(library: Path) -> None:
    body = """
        onnxruntime.register_execution_provider_library(NAME, LIBRARY)
        print(*(device.device.type.name for device in ours()))
        onnxruntime.register_execution_provider_library(NAME + ".virtual", LIBRARY)
        print(*(device.device.type.name for device in ours()))
        onnxruntime.unregister_execution_provider_library(NAME + ".virtual")
        print(*(device.device.type.name for device in ours()))
    """
    # A machine with an NPU offers it too.
    found = [kind for kind in run(library, body) if kind != "NPU"]
    assert found == ["CPU", "CPU", "CPU"]


def test_session_on_virtual_device_is_emulated(library: Path) -> None:
    """Without artifacts beside the model the session fails, but with an error of the emulator."""
    body = """
        import onnx, onnx.parser
        onnxruntime.register_execution_provider_library(NAME + ".virtual", LIBRARY)
        graph = '<ir_version: 10, opset_import: ["": 21]> g (float[2] x) => (float[2] y) { y = Add(x, x) }'
        options = onnxruntime.SessionOptions()
        options.add_provider_for_devices(ours(), {"placement": "stderr"})
        try:
            onnxruntime.InferenceSession(onnx.parser.parse_model(graph).SerializeToString(), options)
            print("emulate")
        except Exception as error:
            print("emulate" if "emulate" in str(error) else error)
    """
    assert run(library, body) == ["emulate"]


def test_only_model_compiled_for_emulator_is_compatible(library: Path) -> None:
    """ORT's query, to which the device without a session answers; its enumerators have the API's numbers."""
    body = """
        from onnxruntime.capi._pybind_state import get_model_compatibility_for_ep_devices
        onnxruntime.register_execution_provider_library(NAME + ".virtual", LIBRARY)
        layout = "decoder layers 5, encoder layers 1, operators 1"
        for text in (f"emulate, {layout}, artifacts 0123", f"emulate, {layout} and more", "emulate, none", "cpu"):
            print(get_model_compatibility_for_ep_devices(ours(), "flownpu-context 4; " + text).name)
    """
    assert run(library, body) == ["EP_SUPPORTED_OPTIMAL", "EP_UNSUPPORTED", "EP_UNSUPPORTED", "EP_UNSUPPORTED"]
