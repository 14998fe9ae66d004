"""The contract may grow and never change a meaning: today's descriptors against the checked-in baseline.

A removed field must stay reserved by number and name. scripts/proto --baseline renews the baseline; do it after adding.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

V1 = Path(__file__).resolve().parents[2] / "proto" / "wavepp_proto" / "v1"
PACKAGE = "wavepp.v1"


def baseline() -> dict[str, FileDescriptorProto]:
    """The files of our package in the checked-in descriptor set, by path."""
    files = FileDescriptorSet.FromString((V1 / "descriptor.binpb").read_bytes()).file
    return {file.name: file for file in files if file.package == PACKAGE}


def current() -> dict[str, FileDescriptorProto]:
    """The files of our package as the generated code describes them, by path."""
    files = {}
    for path in sorted(V1.glob("*.proto")):
        module = importlib.import_module(f"wavepp_proto.v1.{path.stem}_pb2")
        file = FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
        files[file.name] = file
    return files


def breaking_changes(old: dict[str, FileDescriptorProto], new: dict[str, FileDescriptorProto]) -> list[str]:
    """One line for every change that an older peer would misread or miss."""
    found: list[str] = []
    for name, file in old.items():
        if name not in new:
            found.append(f"{name}: file removed")
            continue
        found += _messages(file.message_type, new[name].message_type, name)
        found += _enums(file.enum_type, new[name].enum_type, name)
        found += _services(file.service, new[name].service, name)
    return found


def _messages(old: Iterable[DescriptorProto], new: Iterable[DescriptorProto], where: str) -> Iterator[str]:
    there = {message.name: message for message in new}
    for message in old:
        here = f"{where}:{message.name}"
        if message.name not in there:
            yield f"{here}: message removed"
            continue
        yield from _fields(message, there[message.name], here)
        yield from _messages(message.nested_type, there[message.name].nested_type, here)
        yield from _enums(message.enum_type, there[message.name].enum_type, here)


def _fields(old: DescriptorProto, new: DescriptorProto, where: str) -> Iterator[str]:
    there = {field.number: field for field in new.field}
    reserved = {number for span in new.reserved_range for number in range(span.start, span.end)}
    for field in old.field:
        if field.number in there:
            if _shape(field, old) != _shape(there[field.number], new):
                yield f"{where}.{field.name}: field {field.number} changed its name, type, label or oneof"
        elif field.number not in reserved or field.name not in new.reserved_name:
            yield f"{where}.{field.name}: field {field.number} removed without reserving number and name"


def _shape(field: FieldDescriptorProto, message: DescriptorProto) -> tuple[object, ...]:
    oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else None
    return field.name, field.type, field.type_name, field.label, oneof


def _enums(old: Iterable[EnumDescriptorProto], new: Iterable[EnumDescriptorProto], where: str) -> Iterator[str]:
    there = {enum.name: enum for enum in new}
    for enum in old:
        if enum.name not in there:
            yield f"{where}:{enum.name}: enum removed"
            continue
        names = {value.number: value.name for value in there[enum.name].value}
        for value in enum.value:
            if names.get(value.number) != value.name:
                yield f"{where}:{enum.name}: value {value.name} = {value.number} changed or removed"


def _services(
    old: Iterable[ServiceDescriptorProto], new: Iterable[ServiceDescriptorProto], where: str
) -> Iterator[str]:
    there = {(service.name, method.name): method for service in new for method in service.method}
    for service in old:
        for method in service.method:
            if there.get((service.name, method.name)) != method:
                yield f"{where}:{service.name}.{method.name}: method changed or removed"


def test_contract_only_grows_when_compared_with_the_baseline() -> None:
    assert breaking_changes(baseline(), current()) == []


def _drop_field(file: FileDescriptorProto) -> None:
    del file.message_type[0].field[0]


def _renumber_field(file: FileDescriptorProto) -> None:
    file.message_type[0].field[0].number = 1000


def _rename_field(file: FileDescriptorProto) -> None:
    file.message_type[0].field[0].name = "renamed"


def _retype_field(file: FileDescriptorProto) -> None:
    file.message_type[0].field[0].type = FieldDescriptorProto.TYPE_FIXED64


def _drop_message(file: FileDescriptorProto) -> None:
    del file.message_type[0]


def _drop_method(file: FileDescriptorProto) -> None:
    del file.service[0].method[0]


def _unstream_method(file: FileDescriptorProto) -> None:
    file.service[0].method[0].server_streaming = not file.service[0].method[0].server_streaming


BREAKS = [_drop_field, _renumber_field, _rename_field, _retype_field, _drop_message, _drop_method, _unstream_method]


@pytest.mark.parametrize("change", BREAKS, ids=lambda change: change.__name__.strip("_"))
def test_break_is_named_when_a_file_changes(change: Callable[[FileDescriptorProto], None]) -> None:
    old, new = current(), current()
    victim = next(file for file in new.values() if file.service and file.message_type[0].field)
    change(victim)
    assert len(breaking_changes(old, new)) == 1


def test_removed_field_is_no_break_when_reserved_by_number_and_name() -> None:
    old, new = current(), current()
    message = next(file for file in new.values() if file.message_type[0].field).message_type[0]
    message.reserved_range.add(start=message.field[0].number, end=message.field[0].number + 1)
    message.reserved_name.append(message.field[0].name)
    del message.field[0]
    assert breaking_changes(old, new) == []


def test_each_method_has_messages_of_its_own_when_the_contract_grows() -> None:
    methods = [method for file in current().values() for service in file.service for method in service.method]
    used = [name for method in methods for name in (method.input_type, method.output_type)]
    assert sorted(used) == sorted(set(used))
