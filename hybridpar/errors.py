"""Errors that a user can act on. Imports nothing of hybridpar."""

from __future__ import annotations

import errno
import reprlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Errors of a disk, which may not name a file."""
_NO_MEMORY = (
    "can't allocate memory",
    "Cannot allocate memory",
    "out of memory",
    "aoti_torch_empty_strided",
)
"""Messages of torch, CUDA and NCCL about an allocation that failed. The last one names a compiled
operator that asked for a tensor."""
_NO_MEMORY_ENDS = ("could not create a primitive", "failed to map segment from shared object")
"""Ends of messages of oneDNN and of the loader of libraries about failed allocations. If they fail
for another reason, the message continues with it."""
_NO_THREAD = ("can't start new thread", "Resource temporarily unavailable")
"""Messages of Python and Gloo about a thread that could not be started."""
_LIBRARIES = (f"{Path(__file__).parent}/", "/site-packages/torch/", "<frozen ")
"""Places of code that is not the user's."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 16
_LONGEST = 20_000
"""Upper bound of the characters of a message."""


def described(value: object) -> str:
    """Return what a value is, in a few words: modules and tensors by their type, others as `shown`
    writes them.
    """
    kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(value).__mro__}
    if "torch.nn.modules.module.Module" in kinds:
        return f"the torch.nn.Module {type(value).__name__}"
    if "torch.Tensor" in kinds:
        return f"a tensor of shape {tuple(getattr(value, 'shape', ()))}"
    return shown(value)


def shown(value: object) -> str:
    """Return a value as Python writes it, cut short, because it may be a complete file of unknown
    origin.
    """
    try:
        return _SHORT.repr(value)
    except (ValueError, RecursionError):  # such as an integer of very many digits
        return f"<{type(value).__name__}>"


def printable(text: str) -> str:
    """Return a message without control characters: names in it may contain anything."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def not_utf8(text: str) -> str:
    """Return why a text is not UTF-8, in words; empty if it is.

    Python represents a byte of an argument or file name that it cannot decode as half of a
    surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        if 0xDC80 <= code <= 0xDCFF:
            return f"byte 0x{code - 0xDC00:02x} behind {shown(text[: error.start])} is not"
        return f"character {error.start} is half of a surrogate pair"
    return ""


def about_file(error: OSError) -> str:
    """Return an error of a file or a disk as one line; empty if it is another error."""
    if error.filename is None and error.errno not in FULL_DISK:
        return ""
    return f"{error.filename or 'a disk'}: {error.strerror}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on a CPU or a GPU, or a library could not be loaded for
    lack of memory.

    An import that fails may hide the reason behind another error, as numpy does.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if not isinstance(error, RuntimeError | ImportError | OSError):
        return False
    said = str(error)
    if any(words in said for words in _NO_MEMORY) or said.endswith(_NO_MEMORY_ENDS):
        return True
    cause = error.__cause__ if isinstance(error, ImportError) else None
    return cause is not None and is_out_of_memory(cause)


def lacks_threads(error: BaseException) -> bool:
    """Return whether a thread could not be started, for lack of memory or of entries in the process
    table.
    """
    return isinstance(error, RuntimeError) and str(error) in _NO_THREAD


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if there is no
    message."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def in_a_line(error: BaseException) -> str:
    """Return an error as one line, if a run can continue without the part that failed."""
    kind = "" if isinstance(error, HybridparError) else f"{type(error).__name__}: "
    return first_line(error) if is_out_of_memory(error) else f"{kind}{first_line(error)}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with the user's input: where, what, which rule, and a value that works.

    is_guess: the suggestion is a known name that the unknown one probably meant.
    """

    field: str
    value: object
    rule: str
    suggestion: str = ""
    is_guess: bool = False

    def __str__(self) -> str:
        text = f"{shown(self.field)[1:-1]} = {described(self.value)}: {self.rule}"
        if not self.suggestion:
            return text
        if self.is_guess:
            return f"{text}; did you mean {self.suggestion}?"
        return f"{text}; try {self.suggestion}"


class HybridparError(Exception):
    """Base of the errors raised on purpose; any other error is a defect of hybridpar.

    Attributes:
        may_pass: A retry may succeed; otherwise it would fail in the same way.
        has_users_cause: Its cause is an error of the user's own code, which is shown with it.
    """

    may_pass = False
    has_users_cause = False

    def __init__(self, message: str):
        super().__init__(printable(message))

    def note_may_pass(self) -> None:
        """Note that a retry may succeed."""
        self.may_pass = True


class ConfigError(HybridparError):
    """The configuration, or an argument, cannot work. Lists every problem found, not just the
    first.
    """

    def __init__(self, *problems: Problem):
        self.problems = problems
        super().__init__("\n".join(f"  - {p}" if len(problems) > 1 else str(p) for p in problems))


class DataError(HybridparError):
    """A file that was read is damaged, truncated, or not of the kind that its name says."""


class CheckpointError(HybridparError):
    """A checkpoint cannot be loaded (missing, damaged, or made by another model), or cannot be
    written."""


class NotFiniteError(CheckpointError):
    """A tensor of a checkpoint has NaN or infinity in it, so it is neither written nor loaded.

    step: the step of the state that was about to be saved; 0 if only the file is known.
    """

    def __init__(self, message: str, step: int = 0):
        super().__init__(message)
        self.step = step


def config_error(field: str, value: object, rule: str, suggestion: str = "") -> ConfigError:
    """Create a ConfigError with one problem, the common case."""
    return ConfigError(Problem(field, value, rule, suggestion))


Class = TypeVar("Class", bound=type)


def raises_short_errors(kind: Class) -> Class:
    """Make a class's public methods raise a HybridparError without the frames and errors inside
    hybridpar.

    Its message says what to change, and these frames would hide it. Other errors are defects, and
    keep their frames.
    """
    for name, value in list(vars(kind).items()):
        if callable(value) and (name == "__init__" or not name.startswith("_")):
            setattr(kind, name, _shortened(value))
    return kind


def _shortened(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except HybridparError as error:
            raise error.with_traceback(None) from error.__cause__ if error.has_users_cause else None

    return call


def raised_at(error: BaseException) -> str:
    """Return the last line of the user's own code on the way to an error, as " (model.py, line
    12)"; empty if there is none.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_of_user(frame)]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def trace_from_users_code(error: BaseException) -> str:
    """Return the traceback of an error from its first line in the user's own code on, or the
    complete traceback if there is no such line.

    The earlier lines, of this package and of torch, say nothing about an error in a loss or in a
    data set.
    """
    frames = traceback.extract_tb(error.__traceback__)
    first = next((number for number, frame in enumerate(frames) if _is_of_user(frame)), None)
    if first is None or error.__cause__ is not None or error.__context__ is not None:
        return "".join(traceback.format_exception(error)).rstrip()
    lines = [
        "Traceback (most recent call last):\n",
        *traceback.format_list(frames[first:]),
        *traceback.format_exception_only(error),
    ]
    return "".join(lines).rstrip()


def _is_of_user(frame: traceback.FrameSummary) -> bool:
    return not any(library in frame.filename for library in _LIBRARIES)
