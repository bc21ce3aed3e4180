"""JSON schemas in the words that xgrammar applies: what it would leave out is refused."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NoReturn

from arbor.engine.regex import json_characters, within_json
from arbor.errors import UsageError

_IGNORED = (
    *("not", "if", "then", "else", "contains", "uniqueItems", "$dynamicRef", "$recursiveRef"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
)
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")  # names, not keywords
_VALUES = ("enum", "const", "default", "examples", "discriminator")
_DECIDING = {  # of a schema's, xgrammar reads the first alone; and what works in place of the rest
    "$ref": "Write it into the schema that '$ref' names.",
    "const": "Leave it out; 'const' is the only value.",
    "enum": "Leave it out, and the values that do not fit it.",
    "anyOf": "Write it into each schema of 'anyOf'.",
    "oneOf": "Write it into each schema of 'oneOf'.",
    "allOf": "Write it into the schema of 'allOf'.",
}
_BOUNDS = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"),
    "object": (
        *("properties", "required", "patternProperties", "additionalProperties"),
        *("unevaluatedProperties", "propertyNames", "minProperties", "maxProperties"),
    ),
}
_TYPES: dict[str, type | tuple[type, ...]] = {
    "null": type(None),
    "boolean": bool,
    "integer": (),  # by its value
    "number": (int, float),
    "string": str,
    "array": list,
    "object": dict,
}
_SHAPES = {
    **dict.fromkeys(("$ref", "pattern", "format"), ("string",)),
    **dict.fromkeys(("enum", "anyOf", "oneOf", "allOf", "prefixItems", "required"), ("array",)),
    **dict.fromkeys(("properties", "patternProperties"), ("object",)),
    **dict.fromkeys(_BOUNDS["number"], ("number",)),
    **dict.fromkeys(
        (f"{end}{name}" for end in ("min", "max") for name in ("Length", "Items", "Properties")),
        ("integer",),
    ),
    "type": ("string", "array"),
}
_FORMATS = (  # that xgrammar applies
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
    *("uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
)
_MOST_MULTIPLE, _MOST_VALUES = 1024, 10_000  # of whole numbers with 'multipleOf'
_MOST_SCHEMAS = 2_000  # to choose from, each as often as a reference leads to it

_AFTERWARDS = "Leave it out and check it afterwards."


def applied(schema: Any) -> Any:
    """A JSON schema that xgrammar applies whole; every text it allows is valid by the given one.

    It has ``anyOf`` for ``oneOf``, whose schemas have to be told apart: by types, values, or the
    values of a required property. A schema without ``type`` is for values of the types that its
    bounds are for. Objects with ``properties`` and arrays with ``prefixItems`` have no others
    unless the schema says so or needs them.

    Args:
        schema: as JSON has it.

    Raises:
        UsageError: it asks for what a format cannot apply; names the keyword.
    """
    return _Schemas(schema).applied(schema)


def _refuse(what: str, hint: str = _AFTERWARDS) -> NoReturn:
    raise UsageError(
        "step-format", f"the JSON schema has {what}, which a format cannot apply.", hint
    )


class _Schemas:
    """The schemas within one."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._count = 0  # of those to choose from

    def applied(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self.applied(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        for word in _IGNORED:
            if schema.get(word, False) is not False:
                _refuse(f"'{word}'")
        schema = self._typed(_one_decides(schema))
        inner = {}
        for word, each in schema.items():
            if word in _BY_NAME and isinstance(each, dict):
                inner[word] = {name: self.applied(one) for name, one in each.items()}
            elif word not in _VALUES:
                inner[word] = self.applied(each)
        return {**schema, **inner}

    def _typed(self, schema: dict[str, Any]) -> dict[str, Any]:
        """A schema whose type is in the schemas that decide, or beside its bounds."""
        word = _deciding(schema)
        if word:
            if "type" not in schema:
                return self._any_of(schema) if word == "oneOf" else schema
            found = self._narrowed(schema, list(_TYPES))
            if found is None:
                raise UsageError(
                    "step-format",
                    f"the JSON schema has a 'type' that nothing of its '{word}' has.",
                    "Give the type of the values.",
                )
            return self._typed(found)
        types = _listed(schema.get("type") or [each for each in _BOUNDS if _bounds(schema, each)])
        if "number" in types or "integer" in types:
            schema, types = _number(schema, types)
        if "string" in types:
            schema = _string(schema)
        if "array" in types:
            schema = _array(schema)
        if "object" in types:
            schema = self._object(schema)
        return {**schema, "type": types[0] if len(types) == 1 else types} if types else schema

    def _narrowed(self, schema: Any, types: Collection[str], above: tuple[str, ...] = ()) -> Any:
        """A schema for those of its values that have one of the types; None if there are none.

        Args:
            schema: any.
            types: names of types.
            above: the references that led to it.
        """
        self._count += 1
        if self._count > _MOST_SCHEMAS:
            _refuse(
                f"more than {_MOST_SCHEMAS:,} schemas to choose from",
                "Give fewer; each counts as often as a '$ref' leads to it.",
            )
        if not isinstance(schema, dict):
            return {"type": list(types)} if schema else None
        schema = _one_decides(schema)
        if "type" in schema:
            types = _common(types, _listed(schema["type"]))
        if not types:
            return None
        word = _deciding(schema)
        if not word:
            return {**schema, "type": list(types)}
        beside = {name: each for name, each in schema.items() if name not in ("type", word)}
        value = schema[word]
        if word == "$ref":
            if value in above:
                _refuse(f"the reference {value!r} to itself")
            target = self._target(value)
            if not target:
                return {**beside, word: value}
            return self._narrowed({**target, **beside}, types, (*above, value))
        if word == "const":
            return {**beside, word: value} if _has_type(value, types) else None
        if word == "enum":
            found = [each for each in value if _has_type(each, types)]
        else:
            given = [self._narrowed(each, types, above) for each in value]
            found = [each for each in given if each is not None]
        return {**beside, word: found} if found else None

    def _target(self, uri: str) -> dict[str, Any]:
        """The schema that a reference names; empty if there is none, which xgrammar reports."""
        found = self._root
        for part in filter(None, uri[1:].split("/")):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found if isinstance(found, dict) else {}

    def _any_of(self, schema: dict[str, Any]) -> dict[str, Any]:
        """A schema with 'anyOf' for its 'oneOf', of whose schemas a value fits one at most."""
        leaves = [list(self._leaves(each)) for each in schema["oneOf"]]
        for (first, some), (second, others) in combinations(enumerate(leaves, 1), 2):
            if not all(one.is_apart(other) for one in some for other in others):
                _refuse(
                    f"schemas {first} and {second} of a 'oneOf' that one value may fit both",
                    "Write 'anyOf'; or give them types without one in common, or a required "
                    "property with another 'const' in each.",
                )
        found = {word: each for word, each in schema.items() if word != "oneOf"}
        return {**found, "anyOf": schema["oneOf"]}

    def _leaves(self, schema: Any) -> Iterator[_Leaf]:
        """The schemas that a schema leaves the choice of, without references."""
        narrowed = self._narrowed(schema, list(_TYPES))
        left = [] if narrowed is None else [narrowed]
        while left:
            each = left.pop()
            word = _deciding(each)
            if word in ("anyOf", "oneOf", "allOf"):
                left += each[word]
            else:
                properties = each.get("properties", {})
                yield _Leaf(
                    _types(each),
                    self._values(each),
                    {name: self._values(one) for name, one in properties.items()},
                    frozenset(each.get("required", ())),
                )

    def _values(self, schema: Any) -> frozenset[Any] | None:
        """The values that a schema, or the one that it refers to, lists; None if it lists none."""
        above = set()
        while isinstance(schema, dict):
            schema = _one_decides(schema)
            word = _deciding(schema)
            if word in ("const", "enum"):
                listed = schema[word] if word == "enum" else [schema[word]]
                return frozenset(map(_hashable, listed))
            if word != "$ref" or schema[word] in above:
                break
            above.add(schema[word])
            schema = self._target(schema[word])
        return None

    def _object(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The bounds of an object."""
        names = schema.get("properties", {})
        patterns = schema.get("patternProperties", {})
        rest = schema.get("additionalProperties", schema.get("unevaluatedProperties"))
        required, least = schema.get("required", []), schema.get("minProperties", 0)
        for name in (name for name in required if name not in names):
            if patterns or "propertyNames" in schema or rest is False:
                _refuse(f"'required' {name!r} outside 'properties'", "Name it in 'properties'.")
            names = {**names, name: {} if rest is None else rest}
        if "propertyNames" in schema:
            if names:
                _refuse("'propertyNames' beside 'properties'")
            if patterns or rest is False:
                beside = "patternProperties" if patterns else "additionalProperties"
                _refuse(f"'propertyNames' beside '{beside}'", "Leave one of them out.")
            keys = self._narrowed(schema["propertyNames"], ["string"])
            schema = {**schema, "propertyNames": keys}
        if patterns and names and rest not in (None, False):
            _refuse("'additionalProperties' beside 'patternProperties' and 'properties'")
        if any(each != next(iter(patterns.values())) for each in patterns.values()):
            _refuse("several schemas in 'patternProperties'", "Give them one schema.")
        for pattern in patterns:
            if name := _matched(pattern, names):
                _refuse(f"the property {name!r} and a pattern for it", "Leave one of them out.")
        is_named = schema.keys() & {"properties", "patternProperties", "propertyNames"} or names
        if rest is None and not patterns and (not is_named or least > len(names)):
            schema, rest = {**schema, "additionalProperties": True}, True
        if least > max(1, len(required)) and (patterns or rest not in (None, False)):
            _refuse(  # a name may be there twice
                f"'minProperties' {least} for properties without names",
                "Name the properties in 'properties' and 'required'.",
            )
        found = {**schema, "properties": names} if names else schema
        if patterns:
            within = {within_json(name): each for name, each in patterns.items()}
            found = {**found, "patternProperties": within}
        return found


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A schema that leaves no choice of schemas.

    Attributes:
        types: of its values.
        values: all of them; None where they are not listed.
        tags: those of its properties, in the same way.
        required: properties.
    """

    types: list[str]
    values: frozenset[Any] | None
    tags: Mapping[str, frozenset[Any] | None]
    required: frozenset[str]

    def is_apart(self, other: _Leaf) -> bool:
        """Whether it is certain that no value fits both."""
        if self.values is not None and other.values is not None:
            return not self.values & other.values
        common = _common(self.types, other.types)
        if common != ["object"]:
            return not common
        for name in self.required | other.required:
            mine, its = self.tags.get(name), other.tags.get(name)
            if mine is not None and its is not None and not mine & its:
                return True
        return False


def _types(schema: Mapping[str, Any]) -> list[str]:
    """The types of the values of a schema that leaves no choice of schemas."""
    if "type" in schema:
        return _listed(schema["type"])
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return [
        name
        for name in _TYPES
        if values is None or any(_has_type(value, [name]) for value in values)
    ]


def _hashable(value: Any) -> Any:
    """A value of JSON, equal where it is; True is equal to 1."""
    if isinstance(value, list):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return frozenset((name, _hashable(each)) for name, each in value.items())
    return value


def _one_decides(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of which one keyword alone decides, or none.

    Raises:
        UsageError: there are bounds beside it, or another one; or a keyword's value is of a wrong
            type.
    """
    for word, kind in _SHAPES.items():
        of_strings = word in ("required", "type")
        if word in schema and not (
            _has_type(schema[word], kind)
            and not (of_strings and any(not isinstance(each, str) for each in schema[word]))
        ):
            raise UsageError(
                "step-format",
                f"the JSON schema has the '{word}' {schema[word]!r:.60}.",
                f"It has to be of the type {' or '.join(kind)}{' of strings' * of_strings}.",
            )
    first = _deciding(schema)
    if not first:
        return schema
    bounds = (word for each in _BOUNDS for word in _bounds(schema, each) if word != "format")
    others = (word for word in _DECIDING if word in schema and word != first)
    beside = next(iter((*others, *bounds)), None)
    if beside:
        _refuse(f"'{beside}' beside '{first}'", _DECIDING[first])
    if first == "allOf" and len(schema[first]) != 1:
        _refuse("other than one schema in 'allOf'", "Write all into one schema.")
    if first == "$ref" and schema[first] != "#" and not schema[first].startswith("#/"):
        _refuse(
            f"the reference {schema[first]!r}", "Write that schema into '$defs', as in '#/$defs/x'."
        )
    return {word: each for word, each in schema.items() if word != "format"}


def _deciding(schema: dict[str, Any]) -> str:
    """The keyword that alone decides; empty if there is none."""
    return next((word for word in _DECIDING if word in schema), "")


def _bounds(schema: dict[str, Any], kind: str) -> list[str]:
    """The keywords of a schema that are for values of a type."""
    return [word for word in _BOUNDS[kind] if word in schema]


def _listed(types: Any) -> list[str]:
    return [types] if isinstance(types, str) else list(types)


def _common(some: Collection[str], others: Collection[str]) -> list[str]:
    """The types in both; whole numbers are numbers."""
    found = [each for each in some if each in others]
    if "number" not in found:
        pairs = ((some, others), (others, some))
        if any("integer" in one and "number" in other for one, other in pairs):
            found = [*(each for each in found if each != "integer"), "integer"]
    return found


def _has_type(value: Any, types: Collection[str]) -> bool:
    """Whether a value has one of the types."""
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer" in types or "number" in types
    return any(isinstance(value, kind) for name, kind in _TYPES.items() if name in types)


def _matched(pattern: str, names: Collection[str]) -> str:
    """The first name that a pattern matches; empty if there is none."""
    try:
        return next((name for name in names if re.search(pattern, name)), "")
    except re.error:  # xgrammar reports it
        return ""


def _number(schema: dict[str, Any], types: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The bounds of a number, and the types; a multiple of a whole number is one."""
    step = schema.get("multipleOf")
    if step is None:
        return schema, types
    whole = list(dict.fromkeys("integer" if each == "number" else each for each in types))
    if step == 1:
        return {word: each for word, each in schema.items() if word != "multipleOf"}, whole
    if not _has_type(step, ["integer"]) or step > _MOST_MULTIPLE:
        _refuse(
            f"'multipleOf' {step}",
            f"Give a whole number up to {_MOST_MULTIPLE:,}, or leave it out.",
        )
    low = [schema[word] for word in ("minimum", "exclusiveMinimum") if word in schema]
    high = [schema[word] for word in ("maximum", "exclusiveMaximum") if word in schema]
    if (low or high) and not (low and high and min(high) - max(low) < _MOST_VALUES):
        _refuse(
            f"'multipleOf' beside one bound, or bounds that are {_MOST_VALUES:,} or more apart",
            "Give two closer bounds, or none.",
        )
    return schema, whole


def _string(schema: dict[str, Any]) -> dict[str, Any]:
    """The bounds of a string, lengths as a pattern."""
    lengths = schema.keys() & {"minLength", "maxLength"}
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if schema.get("format") in _FORMATS:
        if "pattern" in schema:
            _refuse("'pattern' beside 'format'", "Leave one of them out.")
        if "maxLength" in schema or least > 1:
            _refuse("a length beside 'format'", "Leave one of them out.")
        return schema
    if "pattern" in schema:
        if lengths:
            _refuse("a length beside 'pattern'")
        return {**schema, "pattern": within_json(schema["pattern"])}
    if not lengths:
        return schema
    found = {word: each for word, each in schema.items() if word not in lengths}
    return {**found, "pattern": json_characters(int(least), None if most is None else int(most))}


def _array(schema: dict[str, Any]) -> dict[str, Any]:
    """The bounds of an array."""
    named = len(schema.get("prefixItems", ()))
    if schema.keys() & {"items", "unevaluatedItems"}:
        return schema
    if named and schema.get("minItems", 0) <= named:
        return schema
    return {**schema, "items": {}}
