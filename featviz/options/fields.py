"""Fields of records as options of the command line, Python, TOML files and the docs.

A field is an option if `help.HELP` has a text for it. Its type says which values it
takes, and `option` says the rest:

    cmap: Annotated[str, option(DRAWING, "CMAP", first=True)] = "auto"
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct, structs
from msgspec import inspect as types

from featviz.errors import UsageError
from featviz.options.help import HELP
from featviz.options.values import ValueReader, convert, read_text, read_texts
from featviz.text import did_you_mean, quoted

RecordT = TypeVar("RecordT", bound=Struct)

# Headings of options in help. OPTIONS is for commands that have only a few.
OPTIONS = "Options"
LAYERS = "Which layers"
INPUT = "What is read"
MODEL = "The model"
DRAWING = "How maps are drawn"
GRADIENTS = "Gradients and changes"
FINDINGS = "Findings and gates"
OUTPUT = "What is written"
LIMITS = "Limits"
GENERAL = "General"
GROUPS = (
    OPTIONS,
    LAYERS,
    INPUT,
    MODEL,
    DRAWING,
    GRADIENTS,
    FINDINGS,
    OUTPUT,
    LIMITS,
    GENERAL,
)
"""Headings of options, in the order of help."""


@dataclass(frozen=True)
class FieldNotes:
    """What an annotation says of a field, in addition to its type."""

    group: str
    """One of GROUPS."""
    metavar: str = ""
    """Stands for a value in help; empty for a flag, and for an option with choices."""
    first: bool = False
    """Whether the short help of a command with many options shows this one."""
    flags: tuple[str, ...] = ()
    """Names on the command line: `-o`, `--out`."""
    default_text: str = ""
    """What happens without the option; empty if the default value says this already."""
    choices: Collection[str] = ()
    """The values to choose from; empty if any value of the type will do."""
    is_path: bool = False
    """Whether a shell completes the value with names of files."""


def option(group: str, metavar: str = "", **notes: Any) -> Meta:
    """Annotate a field that is an option.

    Args:
        group, metavar, notes: fields of FieldNotes. `metavar` and `flags` may be left out:
            then the field's type and name give them.
    """
    # msgspec keeps `extra` in the type, where `_unpack_type` finds it
    return Meta(extra={"notes": FieldNotes(group, metavar, **notes)})


@dataclass(frozen=True, kw_only=True)
class Option(FieldNotes):
    """A field that is an option, with all that its annotation and its type say."""

    name: str
    """Name in Python."""
    help: str
    """Help text of one or two sentences. Only `--help-all` and Python's documentation show
    the part after a form feed."""
    default: Any
    """Default value; `msgspec.NODEFAULT` for an option that must be given."""
    expects: str
    """What a value is, for messages."""
    read: Callable[[Any], Any]
    """Turns what a user or a program gives into the field's value; see
    `ValueReader.read`."""
    takes_none: bool
    """Whether None is a value of the field. It means: as without the option."""
    repeatable: bool
    """Whether the value is a list, and the option may be given once for each item."""
    is_flag: bool
    """Whether the value is true or false. One that is true by default has a `--no-` form
    on the command line, too."""

    def value(self, value: Any) -> Any:
        """Read the value of the field.

        Args:
            value: a text, or a list of texts for a `repeatable` option, as a user types
                it; what a TOML file holds; or any object of Python. None means: as without
                the option.

        Raises:
            UsageError: this option does not take the value.
        """
        if value is None and self.takes_none:
            return None
        if value is None and self.repeatable:
            return self.default
        try:
            return self.read(value)
        except (ValueError, TypeError, AttributeError):
            raise self._error_for(value) from None
        # the reader has a message of its own: the option's name is added
        except UsageError as error:
            raise UsageError(
                f"{self.name}: {error.message}", error.hint, options=(self.name,)
            ) from None

    def _error_for(self, value: Any) -> UsageError:
        """The error for a value that this option does not take. If the option has choices,
        the hint names the most similar one."""
        # the command line passes a list for a repeatable option, even if the user typed
        # only one text
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        shown = quoted(str(value))
        # an empty text is shown as ''
        message = f"{self.name}={shown or repr(shown)}: expected {self.expects}"
        # other tools call gradcam++ GradCAMPlusPlus or gradcampp
        name = shown.lower().replace("plus", "+").replace("pp", "++")
        hint = did_you_mean(name, self.choices) or None
        return UsageError(message, hint, options=(self.name,))


@cache
def declared_options(record_type: type[Struct]) -> dict[str, Option]:
    """The options that a record declares itself, without those of records inside it (see
    `every_option`).

    Args:
        record_type: a Struct whose option fields are annotated by `option`.

    Returns:
        The options by name, in the order of the fields, which is the order of help. The
        dict is cached: do not change it.
    """
    # a field without a help text is not an option: only programs can set it
    help_texts = HELP.get(record_type.__name__, {})
    # msgspec knows types and bounds, but not the order of a Literal's values
    hints = get_type_hints(record_type, include_extras=True)
    options = {}
    for field in types.type_info(record_type).fields:  # type: ignore[attr-defined]
        if field.name in help_texts:
            options[field.name] = _option_of(
                field, hints[field.name], help_texts[field.name]
            )
    return options


def _option_of(field: types.Field, hint: Any, help_text: str) -> Option:
    """A field as an option.

    Args:
        field: msgspec's description of the field.
        hint: the field's annotation. KeyError if it has no `option`.
        help_text: see `Option.help`.
    """
    leaves, extras = _unpack_type(field.type)
    notes: FieldNotes = extras["notes"]
    choices = tuple(notes.choices)
    # A Literal is taken from the annotation, since msgspec sorts its values. It may be
    # part of a union with None.
    for annotation in (hint.__origin__, *get_args(hint.__origin__)):
        if get_origin(annotation) is Literal:
            choices = get_args(annotation)
    reader: ValueReader = extras.get("reader") or _reader_of(leaves, hint, choices)
    # a mutable default, such as a dict, has a factory
    default = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    return Option(
        name=field.name,
        help=help_text,
        default=default,
        expects=reader.expects,
        read=reader.read,
        group=notes.group,
        first=notes.first,
        flags=notes.flags or (f"--{field.name.replace('_', '-')}",),
        metavar=notes.metavar or reader.metavar,
        default_text=notes.default_text,
        choices=choices,
        takes_none=any(isinstance(leaf, types.NoneType) for leaf in leaves),
        repeatable=reader.repeatable,
        is_flag=any(isinstance(leaf, types.BoolType) for leaf in leaves),
        is_path=notes.is_path or reader.is_path,
    )


def _unpack_type(field_type: types.Type) -> tuple[list[types.Type], dict[str, Any]]:
    """Find the plain types in a type, and what annotations at any level say.

    Args:
        field_type: msgspec's description, such as Metadata around a UnionType around
            Metadata.

    Returns:
        The plain types in a union, or the only one. Then what the annotations hold:
        `notes` from `option`, `reader` from a type of `options.values`.
    """
    if isinstance(field_type, types.Metadata):
        leaves, extras = _unpack_type(field_type.type)
        return leaves, extras | (field_type.extra or {})
    if not isinstance(field_type, types.UnionType):
        return [field_type], {}
    leaves, extras = [], {}
    for member in field_type.types:
        member_leaves, member_extras = _unpack_type(member)
        leaves += member_leaves
        extras |= member_extras
    return leaves, extras


def _reader_of(
    leaves: Sequence[types.Type], hint: Any, choices: Sequence[str]
) -> ValueReader:
    """The reader of a plain type: choices, a number, true or false, texts or a text.

    Args:
        leaves: the plain types in the field's type.
        hint: the field's annotation, which has the bounds of a number.
        choices: the values to choose from; empty if any value of the type will do.
    """
    if choices:
        several = "one of " if len(choices) > 1 else ""
        return ValueReader(
            several + ", ".join(choices), partial(_read_choice, choices=choices)
        )
    read = partial(convert, value_type=hint)
    # the first type that has a reader counts: the others are None
    for leaf in leaves:
        if isinstance(leaf, types.BoolType):
            return ValueReader("true or false", read)
        if isinstance(leaf, types.IntType):
            return ValueReader(f"an integer{_bounds_text(leaf)}", read, metavar="N")
        if isinstance(leaf, types.FloatType):
            return ValueReader(f"a number{_bounds_text(leaf)}", read)
        if isinstance(leaf, types.VarTupleType):
            return ValueReader("a text", read_texts, repeatable=True)
    return ValueReader("a text", read_text)


def _read_choice(value: Any, choices: Sequence[str]) -> str:
    """Read one of several choices. Small and capital letters are the same.

    Args:
        value: a text. True chooses the only choice, as in `tensors=True`.
        choices: at least one; the result is one of these texts.

    Raises:
        ValueError: the text is not among the choices.
        AttributeError: the value is not a text.
    """
    if value is True and len(choices) == 1:
        return choices[0]
    name = value.strip().lower()
    # both names are usual; featviz uses jpg
    if name == "jpeg":
        name = "jpg"
    for choice in choices:
        if choice.lower() == name:
            return choice
    raise ValueError(value)


def _bounds_text(number: types.IntType | types.FloatType) -> str:
    """The bounds of a number as text, to be put after `a number` or `an integer`."""
    # only the combinations that occur in options
    if number.gt is not None and number.lt is not None:
        return f" above {number.gt} and below {number.lt}"
    if number.gt is not None:
        return f" above {number.gt}, at most {number.le}"
    if number.ge is not None and number.le is not None:
        return f" from {number.ge} to {number.le}"
    return "" if number.ge is None else f" ≥ {number.ge}"


def nested_records(record_type: type[Struct]) -> dict[str, Struct]:
    """The records that are default values of a record's fields, by field. Records inside
    these are not listed."""
    records = {}
    for field in structs.fields(record_type):
        if isinstance(field.default, Struct):
            records[field.name] = field.default
    return records


def every_option(*record_types: type[Struct]) -> dict[str, Option]:
    """The options of records, and of the records inside them, at any depth.

    Args:
        record_types: Structs, whose nested records all have defaults. If two declare an
            option of one name, the later one counts.

    Returns:
        The options by name. The default of a nested record's option is taken from the
        outer record's default (`kernels` normalises differently from `run`).
    """
    options: dict[str, Option] = {}
    for record_type in record_types:
        options |= declared_options(record_type)
        for record in nested_records(record_type).values():
            for name, inner in every_option(type(record)).items():
                default = getattr(record, name)
                # the text describes the inner record's default, not another one
                default_text = inner.default_text if default == inner.default else ""
                options[name] = replace(
                    inner, default=default, default_text=default_text
                )
    return options


def read(record_type: type[RecordT], values: Mapping[str, Any]) -> RecordT:
    """Make a record from values as a user or a program gives them.

    Args:
        record_type: type of the record. The records inside it are made from the same
            values.
        values: values by name of the option; missing ones get their defaults. A name may
            also be a field of the record that is not an option: its value is not read,
            but taken as it is.

    Raises:
        UsageError: a value is wrong, or there is no such option.
    """
    # fields that are not options, such as `min_tile`, can be set by a program
    options = every_option(record_type)
    remaining = dict(values)
    plain = {}
    for name in values:
        if name in record_type.__struct_fields__ and name not in options:
            plain[name] = remaining.pop(name)
    record = read_from(record_type, remaining, **plain)
    if remaining:
        raise no_option(remaining, options)
    return record


def read_from(
    record_type: type[RecordT],
    values: dict[str, Any],
    but: Collection[str] = (),
    **fields: Any,
) -> RecordT:
    """Make a record, and the records inside it, from those values that are their options.

    Args:
        record_type: type of the record; its nested records all have defaults.
        values: values by name of the option. Those that are used are removed: what is
            left at the end belongs to other records, or is no option at all.
        but: names of options that are not used.
        **fields: values of fields, which are not read, but taken as they are.

    Raises:
        UsageError: an option does not take its value.
    """
    for name, record in nested_records(record_type).items():
        if name not in fields:
            fields[name] = structs.replace(
                record, **_take_fields(values, type(record), but)
            )
    return record_type(**fields, **_take_fields(values, record_type, but))


def _take_fields(
    values: dict[str, Any], record_type: type[Struct], but: Collection[str]
) -> dict[str, Any]:
    """Read the values that are options of a record, and remove them from `values`.

    Args:
        values: values by name of the option.
        but: names of options that are left in `values`.

    Returns:
        The values of the record's fields, by name.
    """
    fields = {}
    for name, field_option in declared_options(record_type).items():
        if name in values and name not in but:
            fields[name] = field_option.value(values.pop(name))
    return fields


def no_option(wrong: Iterable[str], options: Iterable[str]) -> UsageError:
    """The error for keywords that are not options.

    Args:
        wrong: the keywords, at least one.
        options: names of all options.
    """
    names = list(wrong)
    # a misspelt name is the usual mistake: the whole list is the last resort
    every_name = sorted(options)
    hint = did_you_mean(names[0], every_name, f"there is {', '.join(every_name)}")
    return UsageError(f"no option {', '.join(names)}", hint)
