"""What goes first on the executor's thread, and what is answered without being done."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from wavepp_proto.errors import EngineFault, FormationEnded, InternalError, StaleMessage
from wavepp_stage.runtime.executor_jobs import ADMISSIONS_PER_WAVE, ExecutorJobs


def run_next(jobs: ExecutorJobs, wave_waits: bool) -> bool:
    job = jobs.next_admission(wave_waits)
    if job is not None:
        job.run("test")
    return job is not None


def test_admissions_give_way_when_a_wave_has_waited_for_enough_of_them() -> None:
    jobs = ExecutorJobs()
    futures = [jobs.admit(lambda at=at: at) for at in range(ADMISSIONS_PER_WAVE + 2)]  # type: ignore[misc]
    assert [run_next(jobs, True) for _ in range(ADMISSIONS_PER_WAVE + 1)] == [True] * ADMISSIONS_PER_WAVE + [False]
    jobs.wave_goes()
    assert [run_next(jobs, True) for _ in range(3)] == [True, True, False]
    assert [future.result(0) for future in futures] == list(range(ADMISSIONS_PER_WAVE + 2))


def test_admissions_do_not_give_way_when_no_wave_waits() -> None:
    jobs = ExecutorJobs()
    for _ in range(3 * ADMISSIONS_PER_WAVE):
        jobs.admit(lambda: None)
    assert all(run_next(jobs, False) for _ in range(3 * ADMISSIONS_PER_WAVE))


def test_engine_jobs_are_taken_in_order() -> None:
    jobs = ExecutorJobs()
    done: list[int] = []
    for at in range(3):
        jobs.for_engine(lambda at=at: done.append(at))  # type: ignore[misc]
    while (job := jobs.next_for_engine()) is not None:
        job.run("test")
    assert done == [0, 1, 2]


def test_ended_formation_answers_its_admissions_and_leaves_the_load() -> None:
    jobs = ExecutorJobs()
    admission, load = jobs.admit(lambda: None), jobs.for_engine(lambda: "loaded")
    jobs.refuse_admissions(FormationEnded("over"))
    with pytest.raises(FormationEnded):
        admission.result(0)
    job = jobs.next_for_engine()
    assert job is not None
    job.run("test")
    assert load.result(0) == "loaded"


def test_closing_answers_everything() -> None:
    jobs = ExecutorJobs()
    futures: list[Future[None]] = [jobs.admit(lambda: None), jobs.for_engine(lambda: None)]
    jobs.refuse_all(EngineFault("closing"))
    for future in futures:
        with pytest.raises(EngineFault):
            future.result(0)
    assert jobs.next_for_engine() is None
    assert jobs.next_admission(False) is None


def test_given_up_job_is_not_done() -> None:
    jobs = ExecutorJobs()
    done: list[str] = []
    future = jobs.admit(lambda: done.append("done"))
    assert future.cancel()
    assert run_next(jobs, False)
    assert done == []


@pytest.mark.parametrize(
    ("raised", "told", "broken"),
    [
        (StaleMessage("old"), StaleMessage, False),  # the asker's fault: the engine is as it was
        (EngineFault("gone"), EngineFault, True),
        (InternalError("half of a round was applied"), InternalError, True),
        (RuntimeError("page table"), EngineFault, True),
    ],
)
def test_engine_counts_as_broken_when_it_and_not_the_asker_failed(
    raised: Exception, told: type[Exception], broken: bool
) -> None:
    def work() -> None:
        raise raised

    jobs = ExecutorJobs()
    future = jobs.admit(work)
    job = jobs.next_admission(False)
    assert job is not None
    assert (job.run("test") is not None) is broken
    with pytest.raises(told):
        future.result(0)
