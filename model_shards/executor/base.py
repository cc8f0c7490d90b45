"""The seam between the engine and wherever its shards are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future

from shoal.model_shards.engine.plan import StepOutput, StepPlan
from shoal.model_shards.runner.step_clock import RankTimes


class Executor(ABC):
    """Runs step plans in the order in which they are submitted. Made ready by its constructor, which raises
    ConfigError (or ModelLoadError) if the model cannot be run."""

    vocab_size: int
    """Width of the logits."""
    failure: BaseException | None = None
    """Why the ranks have stopped, as soon as it is known, also while no step runs; None while they are well."""

    @property
    def rank_times(self) -> dict[int, RankTimes]:
        """How each rank has spent its time, a second ago or less; without ranks, nothing."""
        return {}

    @abstractmethod
    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        """Does not block, and does not raise for what happens in the step: a failed step fails its future, and all
        that follow (EngineDeadError), since the ranks' state is then unknown. Futures complete in order."""

    @abstractmethod
    def close(self) -> None:
        """Stops the ranks and fails what is still under way. Idempotent; leaves no process, and no
        thread but one that hangs in a step, which the log then says."""
