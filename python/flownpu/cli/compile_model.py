# SPDX-License-Identifier: Apache-2.0
"""`flownpu compile`: writes a model in the form that the provider makes for a device."""

from flownpu.cli import options
from flownpu.cli.convert import Force, Output, print_made
from flownpu.convert.compilation import compile_model


def compile_model_folder(
    model: options.ModelFolder,
    output: Output,
    device: options.DeviceOption = None,
    option: options.Option = None,
    force: Force = False,
) -> None:
    """Prepare a model for a device, so that later sessions start faster.

    Another device, other artifacts or another version of FlowNPU refuse the compiled model: compile again then.
    """
    compile_model(model, output, options.provider_options(device, None, option), force=force)
    print_made(output, f'flownpu run {output} -p "some text"')
