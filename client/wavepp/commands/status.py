"""`wavepp status`: what a controller serves right now."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wavepp.commands._shared import Controller, Proxy, address_of, run, security
from wavepp_proto.runtime import options as opt

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor

    from wavepp_proto.v1 import admin_pb2


def status(
    controller: Controller = None,
    list_requests: Annotated[
        bool,
        typer.Option("--list-requests/--no-list-requests", envvar="WAVEPP_LIST_REQUESTS", help="Live requests too."),
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch/--no-watch", envvar="WAVEPP_WATCH", help="Again at every change, until Ctrl-C.")
    ] = False,
    tls_ca: opt.TlsCa = None,
    tls_cert: opt.TlsCert = None,
    tls_key: opt.TlsKey = None,
    tls_server_name: opt.TlsServerName = "",
    proxy: Proxy = None,
    as_json: opt.Json = False,
) -> None:
    """Show pipelines and stages (--json: counters too); exit status 1 unless a pipeline can serve."""
    from grpc.aio import AioRpcError

    from wavepp_proto import convert
    from wavepp_proto.runtime.channels import open_channel
    from wavepp_proto.v1 import admin_pb2, admin_pb2_grpc

    async def work() -> bool:
        channel = open_channel(address_of(controller), security(tls_ca, tls_cert, tls_key, tls_server_name), proxy)
        stub = admin_pb2_grpc.AdminStub(channel)
        try:
            if not watch:
                reply = await stub.Status(admin_pb2.StatusRequest(requests=list_requests), timeout=5.0)
                _show(reply, as_json)
                return _can_serve(reply)
            async for update in stub.Watch(admin_pb2.WatchStatusRequest(period_ms=1000)):
                _show(update.status, as_json)
            return True
        except AioRpcError as error:
            raise convert.error_from_rpc(error) from error
        finally:
            await channel.close(0)

    if not run(work()):
        raise typer.Exit(1)


def _can_serve(reply: admin_pb2.StatusResponse) -> bool:
    """The controller makes progress, and has a pipeline to make it with."""
    return bool(reply.ready) and any(pipeline.state == "serving" for pipeline in reply.pipelines)


def _show(reply: admin_pb2.StatusResponse, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(as_dict(reply), allow_nan=False))
        return
    from rich.console import Console

    from wavepp.commands import _status_tables as tables

    out = Console(markup=False)
    out.print(
        f"wavepp {reply.version}, cluster {reply.cluster}, epoch {reply.epoch}, pid {reply.pid}: "
        f"{'ready' if _can_serve(reply) else 'not ready'}{', draining' if reply.draining else ''}"
        f"{', membership frozen (etcd does not answer)' if reply.membership_frozen else ''}",
        highlight=False,
    )
    for pipeline in reply.pipelines:
        out.print(tables.stages(pipeline, out, reply.refused))
        for line in tables.learnt(pipeline):
            out.print(line, highlight=False)
        if absent := tables.without_daemon(pipeline, reply.refused):
            out.print(f"no daemon for {', '.join(absent)}", highlight=False)
        if pipeline.HasField("last_fault"):
            out.print(f"last fault: {pipeline.last_fault.reason}: {pipeline.last_fault.message}", highlight=False)
    for member in reply.refused:
        out.print(
            f"refused: {tables.in_words(member.key)} at {member.address}: {member.error.message}", highlight=False
        )
    if reply.requests:
        out.print(tables.requests(list(reply.requests)))


def as_dict(reply: admin_pb2.StatusResponse) -> dict[str, Any]:
    """For JSON; integers of every width are numbers, which protobuf's own mapping leaves for those of 64 bits."""
    from google.protobuf.json_format import MessageToDict

    data = MessageToDict(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    _numbers(reply.DESCRIPTOR, data)
    return data


def _numbers(descriptor: Descriptor, data: dict[str, Any]) -> None:
    """Make numbers of the 64-bit integers of one message, in place."""
    for field in descriptor.fields:
        if field.name not in data:
            continue
        value = data[field.name]
        nested = field.message_type
        if nested is not None and nested.GetOptions().map_entry:
            nested = None  # maps here are text to text
        elif nested is not None:
            for one in value if isinstance(value, list) else [value]:
                _numbers(nested, one)
        elif field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64):
            data[field.name] = [int(one) for one in value] if isinstance(value, list) else int(value)
