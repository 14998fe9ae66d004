"""Who could serve a pipeline: registrations, and whether they fit together (DESIGN.md).

Owns the records of one pipeline by place (stage, rank), which of two incarnations of one place counts,
and the refusals, each with field, value and limit. The earliest registration says what the pipeline
is; later ones that differ are refused by name and judged again whenever something changes. Does not
own formations: it is told which places are standing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from wavepp_controller.core.events import StageShape
from wavepp_controller.core.verdicts import LEAST_SLOTS
from wavepp_proto import limits
from wavepp_proto.errors import JoinRefused
from wavepp_proto.terms import CacheGroup, DaemonKey, Incarnation, MemberRecord, Rank, StageIndex

MAX_SAID: Final = 128
"""Characters of what a record says that a refusal repeats."""


@dataclass(frozen=True, slots=True)
class Refused:
    record: MemberRecord
    error: JoinRefused


@dataclass(frozen=True, slots=True)
class Roster:
    """The members that fit together, as far as they are there."""

    records: dict[DaemonKey, MemberRecord]
    """Accepted, in (stage, rank) order."""
    missing: tuple[DaemonKey, ...]
    """Places without an accepted member, or whose member was just lost; empty when the pipeline can form."""
    refused: tuple[Refused, ...]

    @property
    def complete(self) -> bool:
        return bool(self.records) and not self.missing

    @property
    def blocking(self) -> JoinRefused | None:
        """Why nothing forms, where a place is empty only because what is there was refused."""
        return next((one.error for one in self.refused if one.record.key in self.missing), None)


@dataclass(slots=True)
class _Member:
    record: MemberRecord
    gone: bool = False
    """Its registration ended; it counts only while it stands in a formation."""
    lost_until: float | None = None
    """A formation lost it: not asked to join before then, and another incarnation of its place takes over."""


@dataclass(slots=True)
class Members:
    _members: dict[DaemonKey, _Member] = field(default_factory=dict)
    """In order of arrival."""
    _heirs: dict[DaemonKey, MemberRecord] = field(default_factory=dict)
    """A second incarnation of a place whose first is not known to be lost."""

    def up(self, record: MemberRecord) -> bool:
        """A registration appeared, or was put again; False if it tells nothing new."""
        member = self._members.get(record.key)
        if member is None:
            self._members[record.key] = _Member(record)
        elif member.record.incarnation == record.incarnation:
            news = member.gone or member.record != record
            member.record, member.gone = record, False
            return news
        elif member.lost_until is not None or member.gone:
            self._replace(record)
        elif member.record.address == record.address:
            # One address has one process: it fenced itself or was restarted, and its earlier life is over.
            self._heirs.pop(record.key, None)
            self._replace(record)
        else:
            self._heirs[record.key] = record
        return True

    def reborn(self, standing: MemberRecord) -> bool:
        """A later incarnation has the place, at the same address: the standing one is no more. One at another address
        proves nothing of the kind, whatever it wrote into the store."""
        member = self._members.get(standing.key)
        if member is None or member.record.incarnation == standing.incarnation:
            return False
        return member.record.address == standing.address

    def gone(self, key: DaemonKey, incarnation: Incarnation, *, standing: bool) -> None:
        """A registration ended; a standing member stays until its formation ends."""
        member, heir = self._members.get(key), self._heirs.get(key)
        if heir is not None and heir.incarnation == incarnation:
            del self._heirs[key]
        if member is None or member.record.incarnation != incarnation:
            return
        member.gone = True
        if not standing:
            self._bury(key)

    def lost(self, key: DaemonKey, incarnation: Incarnation, until: float) -> None:
        """A formation lost this incarnation: it may come back after `until`, but gives way to another."""
        member = self._members.get(key)
        if member is None or member.record.incarnation != incarnation:
            return
        member.lost_until = until
        if key in self._heirs:
            self._replace(self._heirs.pop(key))

    def formation_ended(self) -> None:
        """Nobody stands any more: whoever is gone leaves."""
        for key in [key for key, member in self._members.items() if member.gone]:
            self._bury(key)

    def joined(self, standing: MemberRecord, load: int) -> None:
        """It answered: whatever made it count as lost is over, and its engine comes from this load (0: alone)."""
        member = self._members.get(standing.key)
        if member is not None:
            member.lost_until = None
            if member.record.incarnation == standing.incarnation:
                member.record = replace(member.record, engine_load=load)

    def next_return(self, now: float) -> float | None:
        """When a lost member may be asked again."""
        waits = [m.lost_until for m in self._members.values() if m.lost_until is not None and m.lost_until > now]
        return min(waits, default=None)

    def roster(self, shapes: Mapping[int, StageShape], now: float) -> Roster:
        """The members as they fit together, with the operator's `shapes` by stage laid over."""
        accepted: dict[DaemonKey, MemberRecord] = {}
        refused: list[Refused] = []
        model: MemberRecord | None = None
        for member in self._members.values():
            record = shaped(member.record, shapes)
            error = mismatch(member.record, model) or _states_error(record)
            if error is not None:
                refused.append(Refused(member.record, error))
                continue
            model = model or member.record
            accepted[record.key] = record
        if model is not None:
            _refuse_bands(accepted, model, refused)
        refused += [Refused(heir, _duplicate(heir, self._members[key].record)) for key, heir in self._heirs.items()]
        places = [] if model is None else _places(model)
        absent = {key for key, m in self._members.items() if m.lost_until is not None and m.lost_until > now}
        missing = tuple(key for key in places if key not in accepted or key in absent)
        return Roster({key: accepted[key] for key in sorted(accepted)}, missing, tuple(refused))

    def _replace(self, record: MemberRecord) -> None:
        self._members.pop(record.key, None)
        self._members[record.key] = _Member(record)

    def _bury(self, key: DaemonKey) -> None:
        del self._members[key]
        if key in self._heirs:
            self._replace(self._heirs.pop(key))


def shaped(record: MemberRecord, shapes: Mapping[int, StageShape]) -> MemberRecord:
    """`record` with the operator's band and pool size, and the cache groups of that band."""
    shape = shapes.get(record.key.stage, StageShape(record.key.stage))
    first = record.first_layer if shape.first_layer is None else shape.first_layer
    last = record.last_layer if shape.last_layer is None else shape.last_layer
    return replace(
        record,
        first_layer=first,
        last_layer=last,
        pool_blocks=record.pool_blocks if shape.pool_blocks is None else shape.pool_blocks,
        groups=record.model.groups_of(first, last),
    )


def mismatch(record: MemberRecord, model: MemberRecord | None) -> JoinRefused | None:
    """Why `record` cannot be in a pipeline whose earliest member is `model` (None: it is the first)."""
    if record.protocol != limits.PROTOCOL_VERSION:
        return _refusal(record, "protocol", record.protocol, limits.PROTOCOL_VERSION)
    if not 1 <= record.stages <= limits.MAX_STAGES:
        return _refusal(record, "stages", record.stages, limits.MAX_STAGES)
    if not 1 <= record.block_tokens <= limits.MAX_BLOCK_TOKENS:
        return _refusal(record, "block_tokens", record.block_tokens, limits.MAX_BLOCK_TOKENS)
    if record.pool_blocks < 1:
        return _refusal(record, "pool_blocks", record.pool_blocks, 1)
    if not 0 <= record.key.stage < record.stages:
        return _refusal(record, "stage", record.key.stage, record.stages)
    if not 1 <= record.ranks <= limits.MAX_RANKS:
        return _refusal(record, "ranks", record.ranks, limits.MAX_RANKS)
    if not 0 <= record.key.rank < record.ranks:
        return _refusal(record, "rank", record.key.rank, record.ranks)
    return None if model is None else _disagreement(record, model)


AGREED: Final[Mapping[str, Callable[[MemberRecord], str | int]]] = {
    "engine": lambda record: record.engine,
    "stages": lambda record: record.stages,
    "ranks": lambda record: record.ranks,
    "block_tokens": lambda record: record.block_tokens,
    "layers": lambda record: record.model.layers,
    "recurrent_layers": lambda record: " ".join(map(str, record.model.recurrent_layers)),
    "vocabulary": lambda record: record.model.vocabulary,
    "window": lambda record: record.model.window,
    "hidden": lambda record: record.numerics.hidden,
    "dtype": lambda record: record.numerics.dtype,
    "quantization": lambda record: record.numerics.quantization,
    "packages": lambda record: record.numerics.packages,
    # last: what differs above is told by its own name
    "fingerprint": lambda record: record.model.fingerprint,
}
"""What every member of a pipeline must say alike, by the name that a refusal tells. Rope, weights and whatever else a
model's configuration says are in its fingerprint."""


def _disagreement(record: MemberRecord, model: MemberRecord) -> JoinRefused | None:
    """What `record` says otherwise than `model`, which came first; both are named."""
    for name, read in AGREED.items():
        value, limit = read(record), read(model)
        if value == limit:
            continue
        if name == "fingerprint":
            name, value, limit = "model", _model_name(record), _model_name(model)
        return JoinRefused(
            f"{record.key.place} of {record.key.pipeline} at {record.address}: {name} is {_said(value)}, "
            f"{model.key.place} at {model.address} has {_said(limit)}",
            field=name,
            value=_said(value),
            limit=_said(limit),
            stage=record.key.stage,
            rank=record.key.rank,
            address=record.address,
            other_stage=model.key.stage,
            other_address=model.address,
        )
    return None


def _model_name(record: MemberRecord) -> str:
    """Two folders of one name may hold different models: a piece of the fingerprint tells them apart."""
    return f"{record.model.name[:MAX_SAID]} ({record.model.fingerprint[:12]})"


def _said(value: str | int) -> str | int:
    """As an error may tell it: short, and never nothing."""
    return value if isinstance(value, int) else value[:MAX_SAID] or "unknown"


def _refuse_bands(accepted: dict[DaemonKey, MemberRecord], model: MemberRecord, refused: list[Refused]) -> None:
    """Once every place is taken, bands must tile [0, layers): whoever breaks that is refused."""
    if any(key not in accepted for key in _places(model)):
        return
    expected = 0
    for stage in range(model.stages):
        here = [record for key, record in sorted(accepted.items()) if key.stage == stage]
        end = model.model.layers if stage == model.stages - 1 else here[0].last_layer
        for record in here:
            error = _band_error(record, expected, end)
            if error is not None:
                refused.append(Refused(record, error))
                del accepted[record.key]
                return
        expected = end


def _band_error(record: MemberRecord, first: int, last: int) -> JoinRefused | None:
    if record.first_layer != first:
        return _refusal(record, "first_layer", record.first_layer, first)
    if record.last_layer != last:
        return _refusal(record, "last_layer", record.last_layer, last)
    if record.last_layer <= record.first_layer:
        return _refusal(record, "last_layer", record.last_layer, record.first_layer + 1)
    return None


def _states_error(record: MemberRecord) -> JoinRefused | None:
    """A request needs a working state, and one for the snapshot that it leaves behind."""
    if CacheGroup.RECURRENT in record.groups and record.state_slots < LEAST_SLOTS:
        return _refusal(record, "state_slots", record.state_slots, LEAST_SLOTS)
    return None


def _places(model: MemberRecord) -> list[DaemonKey]:
    return [
        DaemonKey(model.key.pipeline, StageIndex(stage), Rank(rank))
        for stage in range(model.stages)
        for rank in range(model.ranks)
    ]


def _duplicate(heir: MemberRecord, standing: MemberRecord) -> JoinRefused:
    return JoinRefused(
        f"{heir.key} is taken by incarnation {standing.incarnation}, which is not known to be lost",
        field="incarnation",
        value=heir.incarnation,
        limit=standing.incarnation,
        stage=heir.key.stage,
        address=heir.address,
    )


def _refusal(record: MemberRecord, name: str, value: str | int, limit: str | int) -> JoinRefused:
    return JoinRefused(
        f"{record.key} at {record.address}: {name} is {value}, its pipeline needs {limit}",
        field=name,
        value=value,
        limit=limit,
        stage=record.key.stage,
        address=record.address,
    )
