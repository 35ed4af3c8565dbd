"""Fields of records as options: what the command line, Python, TOML and the docs know
of them.

A field is an option if `help.HELP` has a text for it. Its type says what values it
takes, `option` what else there is to know:

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

# Headings of options in help. The first is for the few options of a short command.
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
    """What an annotation says of a field, beside its type."""

    group: str
    """One of GROUPS."""
    metavar: str = ""
    """What help calls its value; empty for a flag, and where there are choices."""
    first: bool = False
    """Whether the short help of a long command shows it."""
    flags: tuple[str, ...] = ()
    """On the command line: `-o`, `--out`."""
    default_text: str = ""
    """What happens without it, where the default does not say so."""
    choices: Collection[str] = ()
    """The values that there are; none where it takes others."""
    is_path: bool = False
    """Whether a shell completes names of files."""


def option(group: str, metavar: str = "", **notes: Any) -> Meta:
    """Annotate a field that is an option.

    Args:
        group, metavar, notes: fields of FieldNotes, which are left out where the type of
            the field or its name says them.
    """
    # msgspec passes `extra` through, and `_taken_apart` gets it back of the type
    return Meta(extra={"notes": FieldNotes(group, metavar, **notes)})


@dataclass(frozen=True, kw_only=True)
class Option(FieldNotes):
    """A field that is an option, with what its type says."""

    name: str
    """In Python."""
    help: str
    """One or two sentences; what stands behind a form feed is for `--help-all` and
    Python alone."""
    default: Any
    """`msgspec.NODEFAULT` where it must be given."""
    expects: str
    """Its values, for messages."""
    read: Callable[[Any], Any]
    """Makes the field's value of a user's or a program's; see `ValueReader.read`."""
    takes_none: bool
    """Whether None stands for what happens without it."""
    repeatable: bool
    """Whether it is a list, and may be given once for each item."""
    is_flag: bool
    """Whether it is true or false, and has a `--no-` as well."""

    def value(self, value: Any) -> Any:
        """The value of the field: from text as a user types it, or as a program passes
        it.

        Args:
            value: a text; a list of texts where the option is `repeatable`; what a TOML
                file holds; any object of Python. None takes what happens without the
                option, where it may be left out.

        Raises:
            UsageError: this option does not take the value.
        """
        # in Python, None stands for what happens without the option
        if value is None and self.takes_none:
            return None
        if value is None and self.repeatable:
            return self.default
        try:
            return self.read(value)
        except (ValueError, TypeError, AttributeError):
            raise self._refused(value) from None
        # a reader that knows better what is wrong says so
        except UsageError as error:
            raise UsageError(
                f"{self.name}: {error.message}", error.hint, options=(self.name,)
            ) from None

    def _refused(self, value: Any) -> UsageError:
        """The error for a value that this option does not take, with the choice that is
        nearest to it."""
        # the command line passes a repeatable option as a list, and one typed no list
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        shown = quoted(str(value))
        # an empty text would leave nothing to be seen
        message = f"{self.name}={shown or repr(shown)}: expected {self.expects}"
        # Grad-CAM++ is called GradCAMPlusPlus or gradcampp elsewhere
        name = shown.lower().replace("plus", "+").replace("pp", "++")
        hint = did_you_mean(name, self.choices) or None
        return UsageError(message, hint, options=(self.name,))


@cache
def declared(record_type: type[Struct]) -> dict[str, Option]:
    """The options that a record itself declares.

    Args:
        record_type: a Struct whose option fields are annotated by `option`.

    Returns:
        By the name of the field, in the order of fields, which is that of help. Left out
        are the options of records in it, see `every_option`. The dict is cached, so
        nobody may change it.
    """
    # a field without a text is not an option: it is for programs alone
    help_texts = HELP.get(record_type.__name__, {})
    # msgspec knows types and bounds; the order of a Literal only the annotation has
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
        field: as msgspec knows it.
        hint: its annotation, with the `Meta` of `option`; KeyError without one.
        help_text: see `Option.help`.
    """
    leaves, extras = _taken_apart(field.type)
    notes: FieldNotes = extras["notes"]
    choices = tuple(notes.choices)
    # msgspec sorts the values of a Literal, help does not; it may stand beside None
    for annotation in (hint.__origin__, *get_args(hint.__origin__)):
        if get_origin(annotation) is Literal:
            choices = get_args(annotation)
    reader: ValueReader = extras.get("reader") or _reader_of(leaves, hint, choices)
    # a mutable default is made anew for each record
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


def _taken_apart(field_type: types.Type) -> tuple[list[types.Type], dict[str, Any]]:
    """The types in a union, and what annotations say at any level.

    Args:
        field_type: as msgspec knows it: Metadata around a UnionType around Metadata …

    Returns:
        The plain types; and by name what `option` (`notes`) and a type of
        `options.values` (`reader`) put into the annotation.
    """
    if isinstance(field_type, types.Metadata):
        leaves, extras = _taken_apart(field_type.type)
        return leaves, extras | (field_type.extra or {})
    if not isinstance(field_type, types.UnionType):
        return [field_type], {}
    leaves, extras = [], {}
    for member in field_type.types:
        member_leaves, member_extras = _taken_apart(member)
        leaves += member_leaves
        extras |= member_extras
    return leaves, extras


def _reader_of(
    leaves: Sequence[types.Type], hint: Any, choices: Sequence[str]
) -> ValueReader:
    """The reader of a plain type: choices, a number, true or false, texts or a text.

    Args:
        leaves: the types in the field's union.
        hint: its annotation, which has the bounds of a number.
        choices: empty where it takes others.
    """
    if choices:
        several = "one of " if len(choices) > 1 else ""
        return ValueReader(
            several + ", ".join(choices), partial(_read_choice, choices=choices)
        )
    read = partial(convert, value_type=hint)
    # one of the leaves may be None; the other says what the option takes
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
    """One of the choices, in any case.

    Args:
        value: a text; True stands for a choice without others, as in `tensors=True`.
        choices: at least one, of which the result is one, in its own case.

    Raises:
        ValueError: a text that is not among the choices.
        AttributeError: what is not a text.
    """
    if value is True and len(choices) == 1:
        return choices[0]
    name = value.strip().lower()
    # both are usual, and files have one ending
    if name == "jpeg":
        name = "jpg"
    for choice in choices:
        if choice.lower() == name:
            return choice
    raise ValueError(value)


def _bounds_text(number: types.IntType | types.FloatType) -> str:
    """The bounds of a number, behind `a number` or `an integer`."""
    # the combinations that options have; of another one a bound would be left out
    if number.gt is not None and number.lt is not None:
        return f" above {number.gt} and below {number.lt}"
    if number.gt is not None:
        return f" above {number.gt}, at most {number.le}"
    if number.ge is not None and number.le is not None:
        return f" from {number.ge} to {number.le}"
    return "" if number.ge is None else f" ≥ {number.ge}"


def nested(record_type: type[Struct]) -> dict[str, Struct]:
    """The records in a record by field, as they are by default; not those deeper inside."""
    records = {}
    for field in structs.fields(record_type):
        if isinstance(field.default, Struct):
            records[field.name] = field.default
    return records


def every_option(*record_types: type[Struct]) -> dict[str, Option]:
    """The options of records and of those in them, at any depth.

    Args:
        record_types: Structs, each of whose nested records has a default. Where several
            declare an option, the last one counts.

    Returns:
        By name; the default of a nested record's option is the one in the outer
        record's default (`kernels` normalises differently from `run`).
    """
    options: dict[str, Option] = {}
    for record_type in record_types:
        options |= declared(record_type)
        for record in nested(record_type).values():
            for name, inner in every_option(type(record)).items():
                default = getattr(record, name)
                # what help says of a default holds for that one alone
                default_text = inner.default_text if default == inner.default else ""
                options[name] = replace(
                    inner, default=default, default_text=default_text
                )
    return options


def read(record_type: type[RecordT], values: Mapping[str, Any]) -> RecordT:
    """A record of values as a user or a program passes them.

    Args:
        record_type: the record; those in it are made as well, of the same values.
        values: by name of the option. Fields that are not options are passed as they
            are; what is missing has its default.

    Raises:
        UsageError: a value is wrong, or there is no such option.
    """
    # what is not an option (`min_tile`) may be passed by a program, as it is
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
    """A record, and the records in it, of those values that are their options.

    Args:
        record_type: the record, each of whose nested records has a default.
        values: by name; what the record takes is removed from it, so that what several
            records leave is not an option of any.
        but: names that it does not take.
        **fields: values of fields as they stand.

    Raises:
        UsageError: an option does not take its value.
    """
    for name, record in nested(record_type).items():
        if name not in fields:
            fields[name] = structs.replace(
                record, **_taken_from(values, type(record), but)
            )
    return record_type(**fields, **_taken_from(values, record_type, but))


def _taken_from(
    values: dict[str, Any], record_type: type[Struct], but: Collection[str]
) -> dict[str, Any]:
    """The fields of a record by those values that are its options; they are removed
    from `values`, so that what is left in the end is not an option of any record.

    Args:
        but: names that are left alone.
    """
    fields = {}
    for name, field_option in declared(record_type).items():
        if name in values and name not in but:
            fields[name] = field_option.value(values.pop(name))
    return fields


def no_option(wrong: Iterable[str], options: Iterable[str]) -> UsageError:
    """The error for keywords that do not exist.

    Args:
        wrong: at least one.
        options: the names that there are.
    """
    names = list(wrong)
    # the whole list is long, and a misspelt name is the usual mistake
    every_name = sorted(options)
    hint = did_you_mean(names[0], every_name, f"there is {', '.join(every_name)}")
    return UsageError(f"no option {', '.join(names)}", hint)
