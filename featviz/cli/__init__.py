"""The command group, the one error boundary, and where messages go."""

from __future__ import annotations

import atexit
import errno
import importlib
import io
import logging
import os
import signal
import sys
import traceback
from contextlib import suppress
from threading import current_thread
from threading import enumerate as enumerate_threads
from typing import Any, cast

import click
from click.shell_completion import CompletionItem

from featviz.cli import mistakes, output
from featviz.errors import FeatvizError
from featviz.text import printable
from featviz.version import __version__

COMMANDS = {
    "look": "Draw one quick picture: input, prediction, maps.",
    "run": "Draw feature maps into a run directory.",
    "report": "Build an HTML report of a run.",
    "layers": "List the modules of a model: shapes, parameters, MACs.",
    "kernels": "Draw the kernels of a model's convolutions.",
    "sheet": "Draw a figure or an animation of runs.",
    "cam": "Show where in an image the evidence for a class lies.",
    "field": "Measure how far layers look: receptive fields.",
    "exemplars": "Show the images that excite each channel most.",
    "audit": "Count dead, constant and non-finite channels.",
    "diff": "Compare two runs, or two models on images.",
    "merge": "Join parts of a run into one run directory.",
    "verify": "Check that every file of a run is as it was written.",
    "identify": "Say what a file of weights is run as.",
}

_FILES = {
    "run": "run",
    "report": "report",
    "merge": "report",
    "verify": "report",
    "sheet": "sheet",
    "diff": "diff",
    "field": "field",
}
"""The module of this folder that defines a command; the others are in `inspect`."""

INTERRUPTED = 130
CLOSED_PIPE = 128 + 13  # the exit code of a program that SIGPIPE has ended, in shells
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


class LazyGroup(click.Group):
    """A group whose commands are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names, in the order of COMMANDS."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        # a matplotlibrc in the current folder could name a backend, which is code
        from featviz.models.requirements import MATPLOTLIBRC

        os.environ["MATPLOTLIBRC"] = str(MATPLOTLIBRC)
        module = importlib.import_module(
            f"featviz.cli.{_FILES.get(cmd_name, 'inspect')}"
        )
        return cast("click.Command", getattr(module, cmd_name))

    def shell_complete(
        self, ctx: click.Context, incomplete: str
    ) -> list[CompletionItem]:
        """Complete names without importing the commands."""
        items = click.Command.shell_complete(self, ctx, incomplete)
        for name, description in COMMANDS.items():
            if name.startswith(incomplete):
                items.append(CompletionItem(name, help=description))
        return items

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _help_all(ctx: click.Context, param: click.Parameter, is_given: bool) -> None:
    """The callback of --help-all of the group."""
    # only now, since this module imports all options
    from featviz.cli.options import show_all_help

    show_all_help(ctx, param, is_given)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="featviz")
@click.option(
    "--help-all",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_help_all,
    help="Show the help of every command and exit.",
)
def group() -> None:
    """See what each layer of a PyTorch vision model makes of your images.

    \b
    Examples:
      featviz look resnet18 cat.jpg
      featviz look net.py:Net cat.jpg --weights weights.pth
      featviz run model.pth photos/ --layers Conv2d,ReLU --out maps
      featviz report maps --open

    `featviz COMMAND --help` describes a command and its common options;
    `featviz COMMAND --help-all` lists all options.
    """


def main() -> None:
    """Entry point: run the command line of this process, and end the process with its
    exit code."""
    _open_closed_streams()
    # The environment is set first, since torch and numpy read it when they are imported.
    # If the processes of torchrun do not find each other, torch logs warnings; featviz has
    # a message of its own
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    # torch's idle threads sleep, and do not keep a core busy
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # several threads of numpy would take longer for our small matrices than one
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # names of files need not be UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    # SIGTERM and SIGHUP shall end a command as Ctrl-C does, which tidies up
    _handle_signals(signal.default_int_handler)
    _end(guarded(sys.argv[1:]))


def _handle_signals(handler: Any) -> None:
    """Let a handler take the signals that ask the process to end. Ignored signals (by nohup,
    say) stay ignored."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _open_closed_streams() -> None:
    """Open standard streams that the caller closed (`>&-`) on the null device. Otherwise the
    next opened file would get the number of such a stream, and output would go into it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))


def _end(code: int) -> None:
    """End the process.

    Usually this calls the functions that were registered with `atexit`, and ends the process
    at once, since Python's own end takes 0.8 s with torch and numba. If a tracer is active,
    or a thread that is no daemon still runs, it is Python's own end. If a thread of featviz
    is loading a library, the functions are not called."""
    # the work is done: from now on a signal ends the process without a traceback
    _handle_signals(signal.SIG_DFL)
    threads = [
        thread for thread in enumerate_threads() if thread is not current_thread()
    ]
    # the process would abort if it were taken down while such a thread loads a library
    is_loading = any(
        thread.daemon and thread.name.startswith("featviz-") for thread in threads
    )
    if not is_loading:
        is_traced = sys.gettrace() or sys.getprofile()
        if is_traced or not all(thread.daemon for thread in threads):
            sys.exit(code)
        atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def guarded(arguments: list[str]) -> int:
    """Run a command line and return its exit code. This is the one place where errors are
    caught: an error that the user can mend becomes a message and a hint on stderr.

    Args:
        arguments: the command line, without `featviz`.

    Raises:
        Exception: a bug of featviz, which shall be seen as a traceback.
    """
    _log_to_stderr()
    try:
        # click would end the process itself, with messages and codes of its own
        result = group.main(
            arguments, prog_name="featviz", standalone_mode=False, obj=tuple(arguments)
        )
        # flush now, since a closed pipe would give a traceback when Python ends
        output.text()
        return result if isinstance(result, int) else 0
    except FeatvizError as error:
        hint = mistakes.hint_of(error, arguments)
        return _print_error(mistakes.as_typed(error), hint, error.exit_code, error)
    # `featviz` without arguments prints the help
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return int(error.exit_code)
    except click.ClickException as error:
        advice = mistakes.of_click(error, arguments, group)
        return _print_error(advice.message, advice.hint, error.exit_code, error)
    except (KeyboardInterrupt, click.Abort):
        return _print_error("interrupted", None, INTERRUPTED, None)
    # the reader of stdout has gone (`| head -1`): nothing is to be said
    except BrokenPipeError:
        output.drop_stdout()
        return CLOSED_PIPE
    except MemoryError as error:
        return _print_error(
            "there is too little memory", "raise the limit (ulimit -v)", 1, error
        )
    except OSError as error:
        return _system_error(error)
    # from click, if the pipe of stdout is closed; or from code of the model
    except SystemExit as error:
        if "PacifyFlush" in type(sys.stdout).__name__:
            output.drop_stdout()
            return CLOSED_PIPE
        if isinstance(error.code, int):
            return error.code
        message = f"code of the model ended the program: {error.code}"
        return _print_error(message, None, 1, error)


def _log_to_stderr() -> None:
    """Send the log of featviz to stderr, from INFO up. Each warning is printed once. A
    warning that is marked `errors.OF_THE_START` waits in `output.waiting`."""
    handler = logging.StreamHandler(sys.stderr)
    output.waiting.clear()
    output.image_hints.clear()
    warnings: set[str] = set()

    def is_printed_now(record: logging.LogRecord) -> bool:
        """Whether to print a message now: not a warning that was printed before, nor one
        that has to wait."""
        # the two models of a comparison usually cause the same warnings
        message = record.getMessage()
        if message in warnings:
            return False
        if record.levelno == logging.WARNING:
            warnings.add(message)
        if hasattr(record, "waits"):
            output.waiting.append(message)
            return False
        output.print_waiting()
        return True

    handler.addFilter(is_printed_now)
    handler.setFormatter(_Formatter())
    logger = logging.getLogger("featviz")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO)  # -q and -v change the level


def _system_error(error: OSError) -> int:
    """Print an error of the system, and return the exit code.

    Raises:
        OSError: `error` itself, unless a file name is too long, or stdout goes to a full
            disk. Any other error may be a bug.
    """
    if error.errno == errno.ENAMETOOLONG:
        return _print_error(f"{error.filename}: {error.strerror}", None, 2, error)
    # an error of stdout has no file name
    if error.filename is not None or error.errno not in _FULL:
        raise error
    output.drop_stdout()
    return _print_error(f"stdout cannot be written: {error.strerror}", None, 1, error)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """`warning: ...`; for INFO only the message. A traceback follows on further
        lines."""
        line = printable(record.getMessage())
        if record.levelno != logging.INFO:
            line = f"{record.levelname.lower()}: {line}"
        # the traceback of a worker process comes as text
        trace = record.exc_text
        if record.exc_info and record.exc_info[0] is not None:
            trace = self.formatException(record.exc_info)
        if trace:
            line += "\n" + _indented(trace)
        return line


def _indented(text: str) -> str:
    """A traceback with each line indented, so that no line of it looks like a message of
    featviz."""
    return "\n".join(f"  {printable(line)}".rstrip() for line in text.split("\n"))


def _print_error(
    message: str, hint: str | None, code: int, error: BaseException | None
) -> int:
    """Print an error, with `-v` also its traceback, and return `code`.

    Args:
        error: the exception with the traceback; None for no traceback.
    """
    output.error(message, hint)
    if error is not None and logging.getLogger("featviz").isEnabledFor(logging.DEBUG):
        click.echo(
            _indented("".join(traceback.format_exception(error))), err=True, nl=False
        )
    return code
