# SPDX-License-Identifier: Apache-2.0
"""The three functions of the package: register, get_library_path, get_ep_name."""

import subprocess
import sys
from pathlib import Path

import pytest

import flownpu
from flownpu.registration import check_onnxruntime_version


def run(script):
    """Runs a script in a process that has not registered anything; returns the last line it prints."""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()[-1]


def test_library_is_in_package():
    path = Path(flownpu.get_library_path())
    assert path.name == "libflownpu_ep.so"
    assert str(path.parent) in flownpu.__path__


def test_missing_library_names_folders(monkeypatch):
    monkeypatch.setattr(flownpu, "__path__", ["/first", "/second"])
    with pytest.raises(flownpu.FlowNPUError, match=r"looked in /first, /second\): install it again"):
        flownpu.get_library_path()


def test_registering_twice_offers_one_device():
    script = """
import flownpu, onnxruntime
flownpu.register()
flownpu.register()
print(sum(device.ep_name == flownpu.get_ep_name() for device in onnxruntime.get_ep_devices()))
"""
    # One device, the processor: a second registration would offer it twice. A machine with an NPU offers that too.
    once = script.replace("flownpu.register()\nflownpu.register()", "flownpu.register()")
    assert run(script) == run(once) != "0"


def test_foreign_registration_is_left_alone():
    assert (
        run("""
import flownpu, onnxruntime
onnxruntime.register_execution_provider_library("another name", flownpu.get_library_path())
before = len(onnxruntime.get_ep_devices())
flownpu.register()
print(len(onnxruntime.get_ep_devices()) == before)
""")
        == "True"
    )


def test_genai_import_registers_library(model):
    script = f"""
import flownpu, sys
flownpu.register()
assert "onnxruntime_genai" not in sys.modules
import onnxruntime_genai as genai
try:
    genai.Model({str(model)!r})
except RuntimeError as error:
    print("Unknown provider name 'FlowNPUExecutionProvider'" in str(error))
flownpu.register()
flownpu.register()
genai.Model({str(model)!r})
print("opened")
"""
    assert run(script) == "opened"
    assert run(script.replace("flownpu.register()\nflownpu.register()\ngenai.Model", "#")) in {"True", "opened"}


@pytest.mark.parametrize("version", ["1.26.0", "0.28.0"])
def test_old_onnxruntime_is_refused(version):
    with pytest.raises(flownpu.FlowNPUError, match=f"needs onnxruntime 1.27 or newer, found {version}: pip install"):
        check_onnxruntime_version(version)


@pytest.mark.parametrize("version", ["1.27.0", "1.31.1", "1.100.0.dev20270101", "2.0.0"])
def test_new_onnxruntime_is_accepted(version):
    check_onnxruntime_version(version)
