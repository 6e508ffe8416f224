"""The project's exceptions. The command line prints one line for each and exits 1.

    HeadraceError
    ├── UsageError          a parameter is out of range, or two contradict each other (exit 2)
    ├── SourceError         a checkpoint cannot be read: missing, truncated, not a number
    │   └── UnsupportedModelError   readable, but of a kind this version does not know
    ├── BundleError         a bundle is missing, damaged, edited, or of another version
    │   └── TokenizerMismatchError  tokenizer and model disagree
    ├── ExportError         an export ran and failed, e.g. a parity gate
    │   └── RknnToolkitError        Rockchip's toolkit is missing, or cannot do what is needed
    ├── ContextFullError    a prompt does not fit the context
    ├── PoolFullError       a request's keys and values can never fit the pool as it is used
    ├── MemoryLimitError    a model with these settings takes more memory than there is for it
    ├── ExactnessError      bit-exact decoding cannot be had with this model on this machine
    ├── ModelOutputError    a pass failed, or its logits are not numbers
    ├── NpuError            the NPU, its driver or its library failed
    │   ├── NpuMissingError         there is no library, or no device
    │   ├── NpuVersionError         library or driver are too old for the model
    │   ├── NpuModelError           the library does not take the model
    │   ├── NpuMemoryError          no memory that the NPU can reach
    │   ├── NpuTimeoutError         a pass took too long
    │   ├── NpuDeviceError          a pass or a call failed, or the device went away
    │   └── NpuCallError            a call with wrong arguments: our own mistake, or a wrong model
    ├── PoolError           a KV block was handed about wrongly: our own mistake, stopped in time
    │   ├── ForeignBlockError       an id that the pool does not have
    │   ├── DoubleFreeError         a block was freed that was free already
    │   └── BlockUnderflowError     a block was freed more often than it was held
    └── StorageError        the disk is full, or a path cannot be written

A message says what was got, what is allowed, and what to do. `assert` is for our own mistakes.
"""


class HeadraceError(Exception):
    """Base of every error that is not a bug; its text is one line meant for the user."""

    exit_code = 1


class UsageError(HeadraceError):
    """A parameter is out of range, or two contradict each other."""

    exit_code = 2


class SourceError(HeadraceError):
    """A checkpoint cannot be read."""


class UnsupportedModelError(SourceError):
    """A checkpoint is readable, but of a kind this version does not know."""


class BundleError(HeadraceError):
    """A bundle is missing, damaged, edited, or of another version."""


class TokenizerMismatchError(BundleError):
    """Tokenizer and model do not belong together."""


class ExportError(HeadraceError):
    """An export ran and failed."""


class RknnToolkitError(ExportError):
    """Rockchip's toolkit is missing, failed, or answered in a way that is not understood."""


class ContextFullError(HeadraceError):
    """A prompt does not fit the context."""


class PoolFullError(HeadraceError):
    """Keys and values of a request can never fit the pool, beside what is kept in it for good."""


class MemoryLimitError(HeadraceError):
    """A model with these settings takes more memory than there is for it."""


class ExactnessError(HeadraceError):
    """Bit-exact decoding cannot be had with this model on this machine."""


class ModelOutputError(HeadraceError):
    """A pass of a model failed, or its logits are not numbers."""


class NpuError(HeadraceError):
    """The NPU, its driver or its library failed; a draft on the CPU can go on."""


class NpuMissingError(NpuError):
    """There is no library, or no device."""


class NpuVersionError(NpuError):
    """Library or driver are too old for the model."""


class NpuModelError(NpuError):
    """The library does not take the model, or it is not what its description says."""


class NpuMemoryError(NpuError):
    """No memory that the NPU can reach."""


class NpuTimeoutError(NpuError):
    """A pass took too long."""


class NpuDeviceError(NpuError):
    """A pass or a call failed, or the device went away."""


class NpuCallError(NpuError):
    """The library refused a call's arguments."""


class PoolError(HeadraceError):
    """A KV block was handed about wrongly. That is a bug of ours, stopped before it did harm."""


class ForeignBlockError(PoolError):
    """An id that the pool does not have."""


class DoubleFreeError(PoolError):
    """A block was freed that was free already."""


class BlockUnderflowError(PoolError):
    """A block was freed more often than it was held."""


class StorageError(HeadraceError):
    """The disk is full, or a path cannot be written."""
