"""Options: declared once, taken alike by Python, the command line and TOML, refused in
one line."""

from __future__ import annotations

import inspect
import json
import logging
import re
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    get_args,
    get_origin,
    get_type_hints,
)

import click
import numpy as np
import pytest
import torch
from msgspec import Meta, Struct, structs
from torch import nn

import featviz as fv
from featviz.api.keywords import NOT_OF_TENSORS, keywords_of
from featviz.cli import options as opts
from featviz.errors import UsageError
from featviz.options import (
    DRAWING,
    HELP,
    DrawOptions,
    InputOptions,
    ModelOptions,
    PassOptions,
    RunOptions,
    declared_options,
    every_option,
    option,
    read,
    read_from,
)
from featviz.options import commands as of_commands
from featviz.options import run as of_run
from featviz.options.commands import ExemplarOptions, SheetOptions
from featviz.records import Shard

from .drawn import drawn

BAD = [
    ("nrow", "x", "nrow=x: expected an integer ≥ 1, or auto"),
    ("nrow", 0, "nrow=0: expected an integer ≥ 1, or auto"),
    ("padding", -1, "padding=-1: expected an integer ≥ 0"),
    ("order", "best", "order=best: expected one of index, mean, similarity"),
    ("channels", "best", "channels=best: expected numbers such as 12,40-43, or top:9"),
    ("channels", "40-12", "channels=40-12: expected numbers such as 12,40-43"),
    ("cmap", "virdis", "'virdis' is no colormap of matplotlib"),
    ("tensor_layout", "foo", "'foo' is no layout"),
    ("size", "abc", "size=abc: expected pixels from 1 to 65536"),
    ("order", True, "order=True: expected one of index, mean, similarity"),
    ("format", True, "format=True: expected one of png"),
    ("preset", True, "preset=True: expected one of imagenet"),
    ("std", "1,nan,1", "std=1,nan,1: expected numbers"),
    ("ablate", "5", "ablate '5' has no channels behind a colon"),
    ("device", "gpu", "'gpu' is no device"),
    ("seed", 10**30, f"seed={10**30}: expected an integer from 0 to {2**63 - 1}"),
    ("model_args", "3", "model_args=3: expected KEY=VALUE"),
    ("shard", "0/2", "shard=0/2: expected I/N with I from 1 to N"),
    ("shard", "3/2", "shard=3/2: expected I/N with I from 1 to N"),
    ("crop", "8x8x8", "crop=8x8x8: expected pixels from 1 to 65536"),
    ("size", 65537, "size=65537: expected pixels from 1 to 65536"),
    ("pad_value", 1.5, "pad_value=1.5: expected a number from 0 to 1"),
    ("collapse", 0, "collapse=0: expected a number above 0, at most 1"),
    ("capture", "outputs", "capture=outputs: expected some of output, input"),
    ("channels", "top:0", "channels=top:0: expected numbers such as 12,40-43"),
]
WRONG_TYPES = [
    *((name, 5) for name in ("cmap", "ablate", "out")),
    ("labels", "x"),
    ("trust", "x"),
    ("normalize", None),
    ("marks", 1),
    ("size", True),
    ("crop", (0, 5)),
    ("mean", [None] * 3),
    ("edit", [3]),
    ("padding", 2.5),
]


class OptionValue(NamedTuple):
    """A value of an option, and what it is read as."""

    record: Any
    name: str
    written: object
    value: object


GOOD: list[OptionValue] = [
    OptionValue(PassOptions, "capture", None, ("output",)),
    OptionValue(ModelOptions, "seed", np.int64(7), 7),
    OptionValue(ModelOptions, "weights", "None", "none"),
    OptionValue(ModelOptions, "weights", "DEFAULT", "default"),
    OptionValue(ModelOptions, "model_args", ["a=1", "b=x"], {"a": 1, "b": "x"}),
    OptionValue(ModelOptions, "model_args", None, {}),
    OptionValue(ModelOptions, "model_args", "act=gelu", {"act": "gelu"}),
    OptionValue(ModelOptions, "model_args", "a=b=c", {"a": "b=c"}),
    OptionValue(ModelOptions, "model_args", ["a=1", "a=(2, 3)"], {"a": (2, 3)}),
    OptionValue(ModelOptions, "model_args", {"a": nn.ReLU}, {"a": nn.ReLU}),
    OptionValue(PassOptions, "ablate", None, ()),
    OptionValue(InputOptions, "size", "224,320", (224, 320)),
    OptionValue(InputOptions, "size", 65536, 65536),
    OptionValue(ExemplarOptions, "top", 1000, 1000),
    OptionValue(RunOptions, "shard", "8/8", Shard(7, 8)),
    OptionValue(InputOptions, "size", "224×320", (224, 320)),
    OptionValue(InputOptions, "size", "224 X 320", (224, 320)),
    OptionValue(InputOptions, "size", ["224", "320"], (224, 320)),
    OptionValue(InputOptions, "size", np.int64(65536), 65536),
    OptionValue(InputOptions, "crop", torch.tensor(224), 224),
    OptionValue(DrawOptions, "channels", torch.tensor(3), "3"),
    OptionValue(InputOptions, "mean", ".5,.5,.5", (0.5, 0.5, 0.5)),
    OptionValue(DrawOptions, "order", "Similarity", "similarity"),
    OptionValue(DrawOptions, "format", "WebP", "webp"),
    OptionValue(DrawOptions, "format", "JPEG", "jpg"),
    OptionValue(DrawOptions, "tensors", True, "npy"),
    OptionValue(DrawOptions, "nrow", "Auto", None),
    OptionValue(DrawOptions, "channels", " TOP:9", "top:9"),
    OptionValue(DrawOptions, "channels", 3, "3"),
    OptionValue(DrawOptions, "channels", np.array([0, 2, 3]), "0,2-3"),
    OptionValue(ModelOptions, "weights", "None", "none"),
    OptionValue(ModelOptions, "weights", "Default", "default"),
    OptionValue(ModelOptions, "weights", Path("W.pth"), "W.pth"),
    OptionValue(ModelOptions, "model_args", ["@hparams"], {}),
    OptionValue(PassOptions, "target", 281, "class:281"),
    OptionValue(PassOptions, "target", "281", "class:281"),
    OptionValue(PassOptions, "target", " class:Tabby ", "class:Tabby"),
    OptionValue(PassOptions, "capture", "grad,output,Grad,", ("grad", "output")),
    OptionValue(RunOptions, "layers", ["Conv2d#0", "fn:add"], "Conv2d#0,fn:add"),
    OptionValue(RunOptions, "layers", "Conv2d[0],fn:add[1:]", "Conv2d#0,fn:add#1:"),
    OptionValue(RunOptions, "layers", "ReLU[-1], !a", "ReLU#-1, !a"),
    OptionValue(RunOptions, "layers", "re:conv[12]", "re:conv[12]"),
    OptionValue(RunOptions, "shard", "2/2", Shard(1, 2)),
    OptionValue(SheetOptions, "images", "a.png, 'b*',", ("a.png", "'b*'")),
    OptionValue(SheetOptions, "images", ["a", "b,c"], ("a", "b", "c")),
]


@pytest.mark.parametrize(("record", "name", "written", "value"), GOOD)
def test_values_as_one_gives_them(
    record: Any, name: str, written: object, value: object
) -> None:
    """None is the default of a list; numbers of numpy, lists of texts, any case, and
    what other tools write are read."""
    further = {"spec": "net"} if record is ModelOptions else {}
    assert getattr(read(record, {name: written, **further}), name) == value


RECORDS = (RunOptions, DrawOptions, PassOptions, InputOptions, ModelOptions)
FLAGS = {option.name: option.flags[-1] for option in every_option(*RECORDS).values()}


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_python_and_the_command_line_use_the_same_words(
    name: str,
    value: Any,
    message: str,
    picture: Path,
    tmp_path: Path,
    featviz: Callable[..., Any],
) -> None:
    """Both refuse the value with the same line, before torch or a model would be
    loaded; the one names the option as it is typed, the other as a keyword."""
    flag = FLAGS[name]
    out = tmp_path / "out"
    done = featviz("run", "squeezenet1_1", picture, f"{flag}={value}", "--out", out)
    assert done.code == 2
    typed = message
    if message.startswith(name):
        typed = f"error: {flag} {message.removeprefix(name).lstrip(' =')}"
    assert typed in done.err.splitlines()[0]
    with pytest.raises(UsageError, match=re.escape(message)):
        fv.run("squeezenet1_1", picture, out=out, **{"weights": "none", name: value})
    assert not out.exists()


SMALL = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


@pytest.mark.parametrize(
    ("function", "arguments", "options", "message", "hint"),
    [
        (fv.run, ["Relu"], {}, "no layer matches layers='Relu'", "did you mean ReLU?"),
        (
            fv.run,
            [],
            {"target": "sum"},
            "target does nothing without gradients",
            "add capture=output,grad, or reduce=gradcam",
        ),
        (
            fv.cam,
            ["class:cat"],
            {},
            "target 'class:cat': no class has this name",
            "give a number, or classes=FILE with",
        ),
        (
            fv.audit,
            [],
            {"fail_on": "deed>5"},
            "fail_on='deed>5': there is no finding 'deed'",
            "did you mean dead?",
        ),
        (fv.Watcher, ["Relu"], {}, "no layer matches layers='Relu'", "did you mean"),
    ],
)
def test_errors_name_options_as_keywords(
    function: Callable[..., Any],
    arguments: list[Any],
    options: dict[str, Any],
    message: str,
    hint: str,
) -> None:
    """Also those that know the command line alone; the note of the traceback, too."""
    with pytest.raises(UsageError) as raised:
        function(SMALL, torch.rand(3, 8, 8), *arguments, size=8, **options)
    assert str(raised.value) == raised.value.message == message
    assert hint in str(raised.value.hint)
    assert raised.value.__notes__ == [f"hint: {raised.value.hint}"]


GUESS = (
    "preprocessing is a guess, preset=none: values are not normalised; mean and std"
    " change it"
)


def test_warnings_name_options_as_keywords(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As errors do; Python prints them as ever where no handler takes them."""
    grey = nn.Conv2d(1, 4, 3)
    fv.look(grey, torch.rand(1, 8, 8))
    assert caplog.messages == [GUESS]
    printed = StringIO()
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(sys, "stderr", printed)
    fv.look(grey, torch.rand(1, 8, 8))
    assert printed.getvalue() == f"{GUESS}\n"


@keywords_of()
def asks_for_a_command() -> None:
    """Raise an error whose hint is a command line."""
    raise UsageError("no --out", "`featviz run --out maps`: featviz run cat --out maps")


def test_command_lines_in_hints_stay() -> None:
    """They are to be typed as they stand."""
    with pytest.raises(UsageError) as raised:
        asks_for_a_command()
    assert raised.value.message == "no out"
    expected = "`featviz run --out maps`: featviz run cat --out maps"
    assert raised.value.hint == expected


OPTION_RECORDS = [
    record
    for module in (of_run, of_commands)
    for record in vars(module).values()
    if isinstance(record, type) and record.__name__ in HELP
]


def literals(annotation: Any) -> tuple[str, ...]:
    """The values of the Literal in an annotation, at any depth; none without one."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return sum(map(literals, get_args(annotation)), ())


def test_every_record_with_options_is_walked() -> None:
    """The records below are all that have texts of help."""
    assert {record.__name__ for record in OPTION_RECORDS} == HELP.keys()


@pytest.mark.parametrize("record", OPTION_RECORDS)
def test_a_literal_is_a_choice_in_help(record: type[Struct]) -> None:
    """So is one that may be None, and so are the choices of a table."""
    hints = get_type_hints(record, include_extras=True)
    for name, declared_option in declared_options(record).items():
        choices = tuple(literals(hints[name]) or declared_option.choices)
        assert tuple(declared_option.choices) == choices, name
        if choices:
            metavars = (declared_option.metavar, f"[{'|'.join(choices)}]")
            assert opts.click_option(declared_option).metavar in metavars, name


@pytest.mark.parametrize("record", OPTION_RECORDS)
def test_an_option_with_choices_takes_no_other_value(record: type[Struct]) -> None:
    """The choices are read in any case, and nothing else is."""
    for name, declared_option in declared_options(record).items():
        if not declared_option.choices:
            continue
        for choice in declared_option.choices:
            assert declared_option.value(choice.upper()) == choice
        for wrong in ("nonsense", "", 5):
            with pytest.raises(UsageError, match=f"^{name}=.*: expected "):
                declared_option.value(wrong)


@pytest.mark.parametrize(("name", "value"), WRONG_TYPES)
def test_values_of_another_type_are_refused(
    name: str, value: Any, picture: Path, tmp_path: Path
) -> None:
    """The error says what the option takes, before anything is written."""
    options = {"out": tmp_path / "out", "weights": "none", name: value}
    with pytest.raises(UsageError, match=f"^{name}=.*: expected "):
        fv.run("squeezenet1_1", picture, **options)
    if name in declared_options(DrawOptions).keys() - {*NOT_OF_TENSORS}:
        with pytest.raises(UsageError, match=f"^{name}=.*: expected "):
            fv.grid(torch.rand(1, 2, 4, 4), **{name: value})
    assert not (tmp_path / "out").exists()


@pytest.mark.medium
@pytest.mark.parametrize(
    "options",
    [
        {"nrow": "AUTO", "scale": "auto", "padding": "2"},
        {"nrow": np.int64(3), "padding": np.int32(1), "pad_value": np.float32(0.5)},
        {
            "nrow": torch.tensor(3),
            "overlay": torch.tensor(0.5),
            "jobs": 1,
            "shard": "1/1",
        },
        {"size": "20,24", "mean": "0 0 0", "std": (".5", ".5", ".5")},
        {"capture": ["output", "input"], "ablate": ["0:1"], "edit": "0:clamp=0,1"},
    ],
)
def test_run_takes_what_means_the_same(
    options: dict[str, Any], tiny: nn.Module, picture: Path, tmp_path: Path
) -> None:
    """Numbers of numpy and torch, lists, and what one would type on the command line are
    taken."""
    assert drawn(tiny, picture, tmp_path / "out", **options)[0].captures
    json.loads((tmp_path / "out" / "run.json").read_text())


class Sparkling(DrawOptions, frozen=True):
    """Drawing options with one more field, which nothing else knows of."""

    sparkle_at: Annotated[Annotated[int, Meta(ge=1)], option(DRAWING)] = 3


@pytest.fixture
def sparkle(monkeypatch: pytest.MonkeyPatch) -> click.Command:
    """A command of these options, which prints the value."""
    texts = {"sparkle_at": "Sparkle N times.", "nrow": "Sparkle in rows."}
    monkeypatch.setitem(HELP, "Sparkling", texts)

    @opts.command(Sparkling)
    def command(values: opts.Values) -> int:
        """A command."""
        click.echo(read_from(Sparkling, dict(values)).sparkle_at)
        return 0

    return command


@pytest.mark.medium
@pytest.mark.parametrize(
    ("arguments", "value"),
    [(["--sparkle-at", "5"], "5\n"), (["--config", "c.toml"], "7\n")],
)
def test_a_field_is_an_option_of_a_command(
    arguments: list[str],
    value: str,
    sparkle: click.Command,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is one on the command line and in TOML."""
    (tmp_path / "c.toml").write_text("sparkle-at = 7\n")
    group = click.Group(commands=[sparkle])
    group.main([str(sparkle.name), *arguments], standalone_mode=False)
    assert capsys.readouterr().out == value


def test_a_field_is_checked_and_in_help(
    sparkle: click.Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its bounds and its default are those of the declaration; a record may say something
    else of a field that it inherits."""
    with pytest.raises(UsageError, match="sparkle_at=0: expected an integer ≥ 1"):
        sparkle.main(["--sparkle-at", "0"], standalone_mode=False)
    with pytest.raises(SystemExit):
        sparkle.main(["--help-all"])
    text = capsys.readouterr().out
    assert re.search(r"--sparkle-at N +Sparkle N times\. +\[default: 3\]", text)
    assert re.search(r"--nrow N +Sparkle in rows\.", text)


def test_a_field_is_a_keyword_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a type, a default and a text; numbers of numpy are read."""
    monkeypatch.setitem(HELP, "Sparkling", {"sparkle_at": "Sparkle N times."})

    @keywords_of(Sparkling)
    def function(**options: Any) -> Sparkling:
        """A function."""
        return read(Sparkling, options)

    parameter = inspect.signature(function).parameters["sparkle_at"]
    assert parameter.annotation is int
    assert parameter.default == 3
    assert "sparkle_at: Sparkle N times." in str(function.__doc__)
    assert function(sparkle_at=np.int8(4)).sparkle_at == 4


FUNCTIONS = "run look cam audit exemplars layers kernels grid diff"


@pytest.mark.parametrize("name", FUNCTIONS.split())
def test_every_function_has_its_options_in_its_signature(name: str) -> None:
    """None hides behind `**options`."""
    parameters = inspect.signature(getattr(fv, name)).parameters.values()
    assert inspect.Parameter.VAR_KEYWORD not in {p.kind for p in parameters}


def test_the_options_of_run_are_described() -> None:
    """Those of drawing and of models stand in its signature and its docstring."""
    parameters = inspect.signature(fv.run).parameters
    assert declared_options(DrawOptions).keys() <= parameters.keys()
    assert declared_options(ModelOptions).keys() <= parameters.keys()
    assert "channels: Draw these channels: 12,40-43" in str(fv.run.__doc__)


@pytest.mark.parametrize(
    "options",
    [{"order": "mean", "reduce": "mean"}, {"cmap": "viridis", "reduce": "pca"}],
)
def test_contradictions_are_refused_in_the_same_words(options: dict[str, Any]) -> None:
    """The option records say what does not go together: grid and run refuse it alike."""
    with pytest.raises(UsageError) as of_record:
        structs.replace(DrawOptions(), **options).check()
    message = re.escape(of_record.value.message)
    with pytest.raises(UsageError, match=message):
        fv.grid(torch.zeros(1, 2, 4, 4), **options)
    with pytest.raises(UsageError, match=message):
        fv.run("resnet18", ["x.png"], **options)


def test_a_list_of_classes_goes_with_a_module_alone() -> None:
    """A MODEL string takes the file of --classes."""
    with pytest.raises(UsageError, match="list of classes is for a module") as raised:
        fv.look("resnet18", torch.rand(3, 8, 8), classes=["cat", "dog"])
    assert raised.value.hint == "classes='names.txt'"
