"""The processes that the torch bench measures: one stage of a pipeline, and one plain transformers model.

Both answer commands on a multiprocessing connection. A stage receives waves, runs them in order with
the product's engine and link, and reports its split of time; the plain process prefills prompts one
after the other in chunks, with transformers' own cache. Started by `torch_engine.py` alone.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from wavepp_proto.errors import LinkFault
from wavepp_proto.terms import Formation, LinkKind, WaveOrdinal
from wavepp_stage.engine.base import EnginePlan, LinkPlan, RowWork, WaveHeader, WaveWork
from wavepp_stage.engine.torch import attention
from wavepp_stage.engine.torch.engine import TorchEngine
from wavepp_stage.engine.torch.gloo_link import TorchLink, open_store
from wavepp_stage.engine.torch.paged_cache import PagedCache

FORMATION = Formation(1)


@dataclass(frozen=True)
class Split:
    """Seconds of one wave on one stage."""

    run: float
    wait: float
    """For the wave itself or its activations: the stage had nothing to do."""
    write: float = 0.0
    read: float = 0.0
    attend: float = 0.0
    """Parts of `run`: keys and values into the cache, out of it, and the attention kernel."""


class Stopwatch:
    """Adds up the time spent in functions; costs about a microsecond a call, for profiled rounds only."""

    def __init__(self) -> None:
        self.spent = {"write": 0.0, "read": 0.0, "attend": 0.0}

    @contextmanager
    def watching(self) -> Any:
        places: list[tuple[Any, str, str]] = [
            (PagedCache, "write", "write"), (PagedCache, "read", "read"), (attention, "_attend", "attend"),
        ]  # fmt: skip
        kept = [getattr(owner, name) for owner, name, _ in places]
        for (owner, name, key), function in zip(places, kept, strict=True):
            setattr(owner, name, self._timed(function, key))
        try:
            yield
        finally:
            for (owner, name, _), function in zip(places, kept, strict=True):
                setattr(owner, name, function)

    def _timed(self, function: Callable[..., Any], key: str) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            result = function(*args)
            self.spent[key] += time.perf_counter() - began
            return result

        return timed

    def take(self) -> dict[str, float]:
        spent, self.spent = self.spent, dict.fromkeys(self.spent, 0.0)
        return spent


class Stage:
    """A daemon reduced to its data path: executor, engine and link."""

    def __init__(self, connection: Connection, plan: EnginePlan, dtype: str) -> None:
        sys.setswitchinterval(1e-4)
        self._connection = connection
        self._plan = plan
        self._engine = TorchEngine(dtype=dtype, threads=1)
        self._engine.load(plan, lambda done, total: None)
        self._waves: SimpleQueue[tuple[WaveOrdinal, tuple[RowWork, ...]] | None] = SimpleQueue()
        self._arrived: SimpleQueue[tuple[WaveHeader, Any]] = SimpleQueue()
        self._watch = Stopwatch()

    def on_activation(self, header: WaveHeader, payload: Any) -> None:
        self._arrived.put((header, payload))

    def on_link_lost(self, reason: str | LinkFault) -> None:
        raise RuntimeError(reason)

    def serve(self, profile: bool) -> None:
        store, address = open_store("127.0.0.1", "127.0.0.1")
        self._connection.send(address)
        link_plan = LinkPlan(LinkKind.GLOO, 1, FORMATION, self._plan.stage, self._plan.stages, self._connection.recv(),
                             "", 0, "127.0.0.1", 30.0, 60.0)  # fmt: skip
        self._link = TorchLink(link_plan, self._engine, self)
        self._link.open()
        threading.Thread(target=self._take_commands, daemon=True).start()
        if profile:
            with self._watch.watching():
                self._execute()
        else:
            self._execute()
        self._link.close()
        del store

    def _take_commands(self) -> None:
        try:
            while (command := self._connection.recv()) is not None:
                ordinal, rows = command
                if not self._plan.is_first:
                    self._link.expect(ordinal, sum(row.length for row in rows))
                self._waves.put(command)
        finally:
            self._waves.put(None)  # the driver is done, or gone

    def _execute(self) -> None:
        idle_since = time.perf_counter()
        while (command := self._waves.get()) is not None:
            ordinal, rows = command
            payload = None if self._plan.is_first else self._arrived.get()[1]
            began = time.perf_counter()
            outcome = self._engine.run(WaveWork(FORMATION, ordinal, rows, bytes(16)), payload)
            ended = time.perf_counter()
            if outcome.payload is not None:
                tokens, hidden = outcome.payload.shape
                self._link.send(WaveHeader(FORMATION, ordinal, bytes(16), tokens, hidden, 0, 0), outcome.payload)
            split = Split(ended - began, began - idle_since, **self._watch.take())
            self._connection.send((ordinal, {result.row: result.token_id for result in outcome.results}, split))
            idle_since = ended


def run_stage(connection: Connection, plan: EnginePlan, dtype: str, profile: bool) -> None:
    Stage(connection, plan, dtype).serve(profile)


def run_plain(connection: Connection, model: Path, dtype: str, chunk: int, threads: int) -> None:
    """Commands: (prefix token ids, list of suffixes); answers (seconds, first tokens). None ends it."""
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(threads)
    factory: Any = AutoModelForCausalLM
    plain = factory.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def extend(cache: Any, token_ids: list[int]) -> int:
        logits: Any = None
        for start in range(0, len(token_ids), chunk):
            ids = torch.tensor([token_ids[start : start + chunk]])
            logits = plain(ids, cache=cache, use_cache=True, logits_to_keep=1).logits
        return int(logits[0, -1].argmax())

    with torch.inference_mode():
        connection.send("ready")
        while (command := connection.recv()) is not None:
            prefix, suffixes = command
            cached = DynamicCache(config=plain.config)
            if prefix:
                extend(cached, prefix)
            began = time.perf_counter()
            tokens = []
            for suffix in suffixes:
                if prefix:
                    # Back to the shared prefix: cheaper than the copy that a server would make.
                    cached.crop(len(prefix) - cached.get_seq_length())
                cache = cached if prefix else DynamicCache(config=plain.config)
                tokens.append(extend(cache, suffix))
            connection.send((time.perf_counter() - began, tokens))
