"""Format exceptions of the user's code with the user's frames only, without those of Cortex and of importlib."""

from __future__ import annotations

import os
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from cortex.errors import ModelError, UserError, type_name
from cortex.masking import mask_known, secrets_of_environment
from cortex.predictor.importing import suggest_import
from cortex.predictor.user_forks import end_if_forked, process_id

_OUR_FOLDER = str(Path(__file__).resolve().parent.parent) + os.sep
_EVENT_LOOP = str(Path(os.__file__).parent / "asyncio") + os.sep
_IMPORT_MACHINERY = (
    "<frozen importlib",
    "<frozen runpy",
    "<frozen zipimport",
    "/importlib/__init__.py",
)
_MESSAGE_LIMIT = 1000
#: Exceptions of a chain or a group that are shown: a recursion that retries in `except` makes a thousand.
_MAX_LINKS = 100
#: Members of a group that Python shows.
_MAX_MEMBERS = 15
_project_prefix: str | None = None  # set by `set_project`


def set_project(folder: Path) -> None:
    """Set the project whose code this process runs; without one, the working directory is regarded as it.

    User code may change the working directory.
    """
    global _project_prefix
    _project_prefix = str(folder.resolve()) + os.sep


def format_user_traceback(exc: BaseException, begins_in_project: bool = False) -> str:
    """Format an exception like Python, without frames of Cortex; paths in the project are relative to it.

    With `begins_in_project`, frames of frameworks before the first frame of the project are left out as well. Secrets
    of the environment are masked: clients of databases put them into messages.
    """
    try:
        return _masked("".join(_shown_chain(exc, _prefix(), begins_in_project).format()))
    except BaseException as error:  # attributes of an exception may be user code
        frames = vars(BaseException)["__traceback__"].__get__(exc)
        stack = _of_user(traceback.extract_tb(frames), _prefix())
        problem = f"{type(exc).__name__}, which can't be formatted: {type(error).__name__}\n"
        return "".join(["Traceback (most recent call last):\n", *stack.format(), problem])


def format_user_stack(frame: FrameType) -> str:
    """Format where a thread is: its frames from the first one of the project on, without those of Cortex."""
    stack = traceback.StackSummary.extract(traceback.walk_stack(frame))
    stack.reverse()
    stack[:] = [each for each in _from_project(stack, _prefix()) if not _is_ours(each.filename)]
    for each in stack:
        each.filename = each.filename.removeprefix(_prefix())
    return "".join(stack.format())


def _prefix() -> str:
    if _project_prefix is not None:
        return _project_prefix
    try:
        return str(Path.cwd()) + os.sep
    except FileNotFoundError:  # user code changed into a folder and removed it
        return ""


def describe(exc: BaseException) -> str:
    """Return one line such as `ValueError: bad weights`, with a hint for missing modules."""
    name = type_name(exc)
    try:
        lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    except BaseException:  # a `__str__` that fails or exits must not hide the exception
        lines = []
    message = f"{name}: {lines[0][:_MESSAGE_LIMIT]}" if lines else name
    if isinstance(exc, ModuleNotFoundError) and exc.name:
        message += f"; {suggest_import(exc.name)}"
    return _masked(message)


def _masked(text: str) -> str:
    return mask_known(text, secrets_of_environment(os.environ))


@contextmanager
def user_code(doing: str) -> Iterator[None]:
    """Convert exceptions of the user's code to UserError; `doing` describes the step, for `sys.exit()`."""
    parent = process_id()
    try:
        try:
            yield
        finally:
            end_if_forked(parent)
    except UserError as exc:
        if isinstance(exc, ModelError) and not exc.traceback:  # raised by a model client: add the frames of the call
            exc.traceback = format_user_traceback(exc)
        raise
    except SystemExit as exc:
        code = "" if exc.code is None else repr(exc.code)
        message = f"sys.exit({code}) was called {doing}; raise an exception to refuse to start"
        raise UserError(message, format_user_traceback(exc)) from exc
    except Exception as exc:
        raise UserError(describe(exc), format_user_traceback(exc)) from exc


def _shown_chain(exc: BaseException, project: str, begins_in_project: bool) -> traceback.TracebackException:
    """Return an exception with those linked to it, which may be many, share members and be cyclic.

    Of more than `_MAX_LINKS`, the newest and the first one are shown.
    """
    top = _shown(exc, project, begins_in_project)
    seen, queue = {id(exc)}, deque([(top, exc)])

    def add(linked: BaseException | None) -> traceback.TracebackException | None:
        if linked is None or id(linked) in seen:
            return None
        left_out = 0
        while len(seen) >= _MAX_LINKS and (earlier := _previous(linked)) is not None and id(earlier) not in seen:
            seen.add(id(linked))
            linked, left_out = earlier, left_out + 1
        seen.add(id(linked))
        shown = _shown(linked, project)
        if left_out:
            shown.__notes__ = [*(shown.__notes__ or ()), f"[{left_out} exceptions after this one are left out]"]
        queue.append((shown, linked))
        return shown

    while queue:
        shown, error = queue.popleft()
        shown.__cause__ = add(_cause(error))
        needs_context = shown.__cause__ is None and not error.__suppress_context__
        shown.__context__ = add(error.__context__) if needs_context else None
        shown.exceptions = None
        if isinstance(error, BaseExceptionGroup):
            members = error.exceptions[: max(min(_MAX_LINKS - len(seen), _MAX_MEMBERS), 0)]
            found = [each for each in map(add, members) if each is not None]
            # Python counts those that it does not show.
            shown.exceptions = found + found[:1] * (len(error.exceptions) - len(members))
    return top


def _cause(error: BaseException) -> BaseException | None:
    """Return the cause of an exception, without the UserError between two exceptions of the user."""
    cause = error.__cause__
    return cause.__cause__ if type(cause) is UserError and cause.__cause__ is not None else cause


def _previous(error: BaseException) -> BaseException | None:
    return _cause(error) or (None if error.__suppress_context__ else error.__context__)


def _shown(exc: BaseException, project: str, begins_in_project: bool = False) -> traceback.TracebackException:
    """Return one exception, without those linked to it."""
    shown = traceback.TracebackException(type(exc), exc, exc.__traceback__, compact=True, _seen=set())
    if begins_in_project:
        shown.stack[:] = _from_project(shown.stack, project)
    shown.stack = _of_user(shown.stack, project)
    if not shown.stack:
        shown.stack = None  # type: ignore[assignment]  # otherwise an empty "Traceback" heading is printed
    if getattr(shown, "filename", None):  # a SyntaxError has its own file name
        shown.filename = shown.filename.removeprefix(project)
    return shown


def _of_user(stack: traceback.StackSummary, project: str) -> traceback.StackSummary:
    """Return the frames of the user's code and of its libraries."""
    stack[:] = [frame for frame in stack[_first_of_user(stack) :] if not _is_ours(frame.filename)]
    for frame in stack:
        frame.filename = frame.filename.removeprefix(project)
    return stack


def _from_project(stack: traceback.StackSummary, project: str) -> list[traceback.FrameSummary]:
    """Return the frames from the first one of the project; all if there is none."""
    first = next((number for number, frame in enumerate(stack) if project and _is_in(frame.filename, project)), 0)
    return stack[first:]


def _is_in(filename: str, project: str) -> bool:
    return filename.startswith(project) and not _is_ours(filename)


def _first_of_user(stack: traceback.StackSummary) -> int:
    """Return the number of frames before the user's first; frames of the event loop may be among ours."""
    count = 0
    for number, frame in enumerate(stack, 1):
        if _is_ours(frame.filename):
            count = number
        elif not frame.filename.startswith(_EVENT_LOOP):
            break
    return count


def _is_ours(filename: str) -> bool:
    return filename.startswith((_OUR_FOLDER, *_IMPORT_MACHINERY[:3])) or filename.endswith(_IMPORT_MACHINERY[3])
