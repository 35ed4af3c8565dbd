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
from typing import cast

import click
from click.shell_completion import CompletionItem

from featviz.cli import mistakes, output
from featviz.errors import FeatvizError
from featviz.text import printable
from featviz.version import __version__

COMMANDS = {
    "look": "Draw one quick picture: input, prediction, telling maps.",
    "run": "Draw feature maps into a run directory.",
    "layers": "List the modules of a model: shapes, parameters, MACs.",
    "kernels": "Draw the kernels of a model's convolutions.",
    "report": "Build an HTML report of a run.",
    "sheet": "Draw one picture of a layer: images by channels.",
    "cam": "Show where in an image the evidence for a class lies.",
    "exemplars": "Show the images that excite each channel most.",
    "audit": "Count dead, constant and non-finite channels.",
    "diff": "Compare two run directories.",
    "merge": "Join parts of a run into one run directory.",
    "verify": "Check that every file of a run is as it was written.",
    "identify": "Say what a file of weights is run as.",
}

INTERRUPTED = 130
CLOSED_PIPE = 128 + 13  # what shells give for a program that SIGPIPE has ended
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
        from featviz.models.requirements import MATPLOTLIBRC

        os.environ["MATPLOTLIBRC"] = str(MATPLOTLIBRC)
        reads_runs = cmd_name in ("report", "sheet", "diff", "merge", "verify")
        file = "report" if reads_runs else "run" if cmd_name == "run" else "inspect"
        module = importlib.import_module(f"featviz.cli.{file}")
        return cast("click.Command", getattr(module, cmd_name))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete names without importing the commands."""
        names = [name for name in COMMANDS if name.startswith(incomplete)]
        return [
            *(CompletionItem(name, help=COMMANDS[name]) for name in names),
            *click.Command.shell_complete(self, ctx, incomplete),
        ]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="featviz")
def group() -> None:
    """See what each layer of a PyTorch vision model makes of your images.

    \b
    Examples:
      featviz look resnet18 cat.jpg
      featviz run resnet18 cat.jpg
      featviz run model.pth photos/ --layers Conv2d,ReLU --out maps
      featviz layers resnet18 --layers 'layer1.*'

    `featviz COMMAND --help` describes a command. It lists common options;
    --help-all lists all.
    """


def main() -> None:
    """Entry point: run a command, and turn what went wrong into one line and an exit code."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # closed (`>&-`): or the next file would get its number
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # what it says of sockets is said by us
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # torch's idle threads leave cores alone
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # for names of files that are no UTF-8
    for name in ("SIGTERM", "SIGHUP"):  # end like Ctrl-C, and tidy up; not what nohup has ignored
        which = getattr(signal, name, None)
        if which is not None and signal.getsignal(which) is not signal.SIG_IGN:
            signal.signal(which, signal.default_int_handler)
    code = guarded(sys.argv[1:])
    # End at once, after what asked to be called at the end: with torch and numba Python's own end
    # takes 0.8 s. A tracer or a thread that is still at work gets that; a thread of ours that still
    # loads in C++ would abort the process while something is called or taken down.
    others = [thread for thread in enumerate_threads() if thread is not current_thread()]
    if not any(thread.daemon and thread.name.startswith("featviz-") for thread in others):
        if sys.gettrace() or sys.getprofile() or not all(thread.daemon for thread in others):
            sys.exit(code)
        atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def guarded(arguments: list[str]) -> int:
    """Run a command line and return its exit code."""
    handler, logger = logging.StreamHandler(sys.stderr), logging.getLogger("featviz")
    handler.setFormatter(_Formatter())
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)  # which -q and -v change
    try:
        result = group.main(arguments, prog_name="featviz", standalone_mode=False)
        output.text()  # or what was printed would fail at the very end
        return result if isinstance(result, int) else 0
    except FeatvizError as error:
        return _say(error.message, mistakes.hint_of(error, arguments), error.exit_code, error)
    except click.exceptions.NoArgsIsHelpError as error:  # the help is the answer
        error.show()
        return int(error.exit_code)
    except click.ClickException as error:
        words, hint = mistakes.of_click(error, arguments)
        return _say(words, hint, error.exit_code, error)
    except (KeyboardInterrupt, click.Abort):
        return _say("interrupted", None, INTERRUPTED, None)
    except BrokenPipeError:  # the reader of stdout has gone (`| head -1`): nothing is to be said
        output.drop_stdout()
        return CLOSED_PIPE
    except MemoryError as error:
        return _say("there is too little memory", "raise the limit (ulimit -v)", 1, error)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return _say(f"{error.filename}: {error.strerror}", None, 2, error)
        if error.filename is not None or error.errno not in _FULL:
            raise
        output.drop_stdout()  # our files name themselves, and click prints help by itself
        return _say(f"stdout cannot be written: {error.strerror}", None, 1, error)
    except SystemExit as error:  # click's own answer to a closed pipe, beside a program's sys.exit
        if "PacifyFlush" in type(sys.stdout).__name__:
            output.drop_stdout()
            return CLOSED_PIPE
        return error.code if isinstance(error.code, int) else 1


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = printable(record.getMessage())
        if record.levelno != logging.INFO:
            line = f"{record.levelname.lower()}: {line}"
        if record.exc_info and record.exc_info[0] is not None:
            line += "\n" + _indented(self.formatException(record.exc_info))
        return line


def _indented(text: str) -> str:
    """Lines of a traceback, of which none looks like a message, whatever an exception says."""
    return "\n".join(f"  {printable(line)}".rstrip() for line in text.split("\n"))


def _say(message: str, hint: str | None, code: int, error: BaseException | None) -> int:
    output.error(message, hint)
    if error is not None and logging.getLogger("featviz").isEnabledFor(logging.DEBUG):
        click.echo(_indented("".join(traceback.format_exception(error))), err=True, nl=False)
    return code
