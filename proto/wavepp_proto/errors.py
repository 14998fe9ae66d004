"""Every error WavePP can answer, as data.

Owns the tree below; each class has fields, the name of its gRPC code (a string: this file knows no
grpc), a stable `reason` that crosses the wire, and whether trying again can help. Transport mapping
is in `convert.py`. tests/unit/test_errors.py checks that the tree and the classes agree.

    WaveppError
      InvalidRequest           INVALID_ARGUMENT     INVALID_REQUEST       no   a field breaks a rule
        EmptyPrompt            INVALID_ARGUMENT     EMPTY_PROMPT          no
        TokenOutOfRange        INVALID_ARGUMENT     TOKEN_OUT_OF_RANGE    no
        PromptTooLong          INVALID_ARGUMENT     PROMPT_TOO_LONG       no   longer than the window
        NeverFits              INVALID_ARGUMENT     NEVER_FITS            no   larger than the smallest pool
        MessageTooLarge        INVALID_ARGUMENT     MESSAGE_TOO_LARGE     no
      UnknownPipeline          NOT_FOUND            UNKNOWN_PIPELINE      no
      UnknownRequest           NOT_FOUND            UNKNOWN_REQUEST       no
      DuplicateRequest         ALREADY_EXISTS       DUPLICATE_REQUEST     no
      TooLate                  DEADLINE_EXCEEDED    TOO_LATE              no   predicted start is past the deadline
      DeadlineExpired          DEADLINE_EXCEEDED    DEADLINE_EXPIRED      no
      Cancelled                CANCELLED            CANCELLED             no
      QueueFull                RESOURCE_EXHAUSTED   QUEUE_FULL            yes
      Draining                 UNAVAILABLE          DRAINING              yes
      PipelineUnavailable      UNAVAILABLE          PIPELINE_UNAVAILABLE  yes  no formation in time
      ControllerUnavailable    UNAVAILABLE          CONTROLLER_UNAVAILABLE yes
      StageLost                UNAVAILABLE          STAGE_LOST            yes  a stage died or fell silent
      FormationEnded           UNAVAILABLE          FORMATION_ENDED       yes  engine, link or time-out fault
      RowVoided                ABORTED              ROW_VOIDED            yes  a request fault inside a wave
        NonFinite              ABORTED              NON_FINITE            no   the row computed NaN or infinity
      StaleMessage             FAILED_PRECONDITION  STALE_MESSAGE         no   fence tuple mismatch
      JoinRefused              FAILED_PRECONDITION  JOIN_REFUSED          no   a stage does not match its pipeline
      EngineFault              INTERNAL             ENGINE_FAULT          yes
      LinkFault                UNAVAILABLE          LINK_FAULT            yes
      MembershipUnavailable    UNAVAILABLE          MEMBERSHIP_UNAVAILABLE yes etcd does not answer
      TokenizerUnavailable     FAILED_PRECONDITION  TOKENIZER_UNAVAILABLE no
      Unauthenticated          UNAUTHENTICATED      UNAUTHENTICATED       no
      InternalError            INTERNAL             INTERNAL              no   a bug; the message names it
"""

from __future__ import annotations

from typing import ClassVar

from wavepp_proto.terms import ErrorInfo

Field = str | int | float | None
ENGINE_HUNG = "ENGINE_HUNG"
"""Field `cause` of a STAGE_LOST whose stage lives, while its engine does not return from a wave."""


class WaveppError(Exception):
    """Base of every typed error. `fields` names what was wrong, the value and the limit."""

    code: ClassVar[str] = "UNKNOWN"
    reason: ClassVar[str] = "UNKNOWN"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, retry_after_ms: int | None = None, **fields: Field) -> None:
        self.message = _sendable(message)
        super().__init__(self.message)
        self.retry_after_ms = retry_after_ms
        self.fields = {name: _sendable(str(value)) for name, value in fields.items() if value is not None}

    def info(self) -> ErrorInfo:
        """This error as data for the wire."""
        return ErrorInfo(self.reason, self.message, tuple(sorted(self.fields.items())), self.retry_after_ms)


def _sendable(text: str) -> str:
    """Whatever an error quotes, it can be sent and printed: a lone surrogate is shown as its escape."""
    return text.encode(errors="backslashreplace").decode()


class InvalidRequest(WaveppError):
    code, reason = "INVALID_ARGUMENT", "INVALID_REQUEST"


class EmptyPrompt(InvalidRequest):
    reason = "EMPTY_PROMPT"


class TokenOutOfRange(InvalidRequest):
    reason = "TOKEN_OUT_OF_RANGE"


class PromptTooLong(InvalidRequest):
    reason = "PROMPT_TOO_LONG"


class NeverFits(InvalidRequest):
    reason = "NEVER_FITS"


class MessageTooLarge(InvalidRequest):
    reason = "MESSAGE_TOO_LARGE"


class UnknownPipeline(WaveppError):
    code, reason = "NOT_FOUND", "UNKNOWN_PIPELINE"


class UnknownRequest(WaveppError):
    code, reason = "NOT_FOUND", "UNKNOWN_REQUEST"


class DuplicateRequest(WaveppError):
    code, reason = "ALREADY_EXISTS", "DUPLICATE_REQUEST"


class TooLate(WaveppError):
    code, reason = "DEADLINE_EXCEEDED", "TOO_LATE"


class DeadlineExpired(WaveppError):
    code, reason = "DEADLINE_EXCEEDED", "DEADLINE_EXPIRED"


class Cancelled(WaveppError):
    code, reason = "CANCELLED", "CANCELLED"


class QueueFull(WaveppError):
    code, reason, retryable = "RESOURCE_EXHAUSTED", "QUEUE_FULL", True


class Draining(WaveppError):
    code, reason, retryable = "UNAVAILABLE", "DRAINING", True


class PipelineUnavailable(WaveppError):
    code, reason, retryable = "UNAVAILABLE", "PIPELINE_UNAVAILABLE", True


class ControllerUnavailable(WaveppError):
    code, reason, retryable = "UNAVAILABLE", "CONTROLLER_UNAVAILABLE", True


class StageLost(WaveppError):
    code, reason, retryable = "UNAVAILABLE", "STAGE_LOST", True


class FormationEnded(WaveppError):
    code, reason, retryable = "UNAVAILABLE", "FORMATION_ENDED", True


class RowVoided(WaveppError):
    code, reason, retryable = "ABORTED", "ROW_VOIDED", True


class NonFinite(RowVoided):
    reason, retryable = "NON_FINITE", False


class StaleMessage(WaveppError):
    code, reason = "FAILED_PRECONDITION", "STALE_MESSAGE"


class JoinRefused(WaveppError):
    code, reason = "FAILED_PRECONDITION", "JOIN_REFUSED"


class EngineFault(WaveppError):
    code, reason, retryable = "INTERNAL", "ENGINE_FAULT", True


class LinkFault(WaveppError):
    code, reason, retryable = "UNAVAILABLE", "LINK_FAULT", True


class MembershipUnavailable(WaveppError):
    code, reason, retryable = "UNAVAILABLE", "MEMBERSHIP_UNAVAILABLE", True


class TokenizerUnavailable(WaveppError):
    code, reason = "FAILED_PRECONDITION", "TOKENIZER_UNAVAILABLE"


class Unauthenticated(WaveppError):
    code, reason = "UNAUTHENTICATED", "UNAUTHENTICATED"


class InternalError(WaveppError):
    code, reason = "INTERNAL", "INTERNAL"


def _walk(root: type[WaveppError]) -> list[type[WaveppError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _walk(child))]


BY_REASON: dict[str, type[WaveppError]] = {cls.reason: cls for cls in _walk(WaveppError)}


def describe(error: WaveppError) -> str:
    """One line for a person: reason, message, fields."""
    fields = ", ".join(f"{name}={value}" for name, value in sorted(error.fields.items()))
    return f"error: {error.reason}: {error.message}" + (f" ({fields})" if fields else "")


def from_info(info: ErrorInfo) -> WaveppError:
    """The typed error that `info` describes; an unknown reason becomes a plain WaveppError."""
    cls = BY_REASON.get(info.reason, WaveppError)
    error = cls(info.message, retry_after_ms=info.retry_after_ms)
    error.fields = dict(info.fields)
    return error
