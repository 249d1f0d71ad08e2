"""What runs flatbuffers for each choice of `--runtime`: the one place that tells them apart."""

from __future__ import annotations

from importlib.util import find_spec

from hermes.errors import UsageError
from hermes.runners.choice import RuntimeChoice
from hermes.runners.flatbuffer import LITERT, Interpreter

TENSORFLOW = Interpreter("TensorFlow", "hermes.runners.tensorflow_lite:TensorFlowSignatures")


def interpreter_for(choice: RuntimeChoice) -> Interpreter:
    """The interpreter behind a choice.

    Raises:
        UsageError: it is not installed.
        ResourceError: it is not set up.
    """
    match choice:
        case RuntimeChoice.LITERT:
            return LITERT
        case RuntimeChoice.ARM64:
            from hermes.deploy.sysroot import require_sysroot

            # It adds a rung and repeats none, but that it is there is said before the work.
            require_sysroot()
            return LITERT
        case RuntimeChoice.TENSORFLOW:
            if find_spec("tensorflow") is None:
                raise UsageError(
                    "--runtime tensorflow: TensorFlow is not installed in this environment",
                    expected="the optional extra `tensorflow`",
                    todo="run: pip install 'hermes-litertlm[tensorflow]' -c constraints.txt",
                )
            return TENSORFLOW
