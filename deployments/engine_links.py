"""A gateway's engines, found as they come and go. A request is sent to one, and goes on in another if that is lost."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Collection

from shoal.configs.app import GatewayConfig
from shoal.configs.errors import EngineDeadError, OverloadedError, ShoalError
from shoal.deployments.balancing import PrefixAffinity
from shoal.deployments.data_plane import DeltaReceiver
from shoal.deployments.engine_link import EngineLink, GatewayEnd
from shoal.deployments.metrics import Metrics, join_metrics
from shoal.deployments.stages import EngineDirectory, EngineGoneError, EngineInfo, EngineStatus
from shoal.deployments.streams import LiveRequest, StreamHub

logger = logging.getLogger("shoal.gateway")

_METRICS_TIMEOUT_S = 5.0
_RETRY_S = 0.5
"""Between two tries to place a request that has to go on."""


class EngineLinks:
    """Lives on the gateway's event loop. All engines must be of one fingerprint, that of the first; another is refused:
    a request that goes on there would change its text."""

    def __init__(
        self,
        directory: EngineDirectory,
        hub: StreamHub,
        config: GatewayConfig,
        metrics: Metrics,
        receiver: DeltaReceiver | None,
    ) -> None:
        """`receiver`: None when the engines are in this process."""
        self._directory, self._hub, self._config, self._metrics = directory, hub, config, metrics
        self._end = GatewayEnd(uuid.uuid4().hex, hub, config, receiver, self._lost)
        self._links: dict[str, EngineLink] = {}
        """By the engine's `instance_id`."""
        self._refused: set[str] = set()
        self._affinity = PrefixAffinity()
        self._info: EngineInfo | None = None
        self._first = asyncio.Event()
        """An engine has been attached."""
        self._ending = False
        hub.gave_back = self._gave_back
        if receiver is not None:
            receiver.on_status = self._on_sign_of_life

    @property
    def info(self) -> EngineInfo:
        """Of the first engine; what a client is shown of it holds for all. Raises EngineDeadError before `connect` has
        succeeded once."""
        if self._info is None:
            raise EngineDeadError("The engine has not answered yet.")
        return self._info

    @property
    def trouble(self) -> str | None:
        """Why requests cannot be served now; None when an engine can take them."""
        if not self._links:
            return "no engine is attached"
        reasons = [link.trouble for link in self._links.values()]
        return None if None in reasons else reasons[0]

    @property
    def all(self) -> list[EngineLink]:
        return list(self._links.values())

    @property
    def statuses(self) -> list[EngineStatus]:
        """The last look at each engine that has answered one."""
        return [link.status for link in self._links.values() if link.status is not None]

    async def connect(self) -> None:
        """Attaches to the first engine, which may still be loading its model, and from then on, until `close`, to each
        that comes. Raises what keeps an engine of this process from answering."""
        if not self._directory.may_grow:
            await self._find()
            return
        self._end.spawn(self._discover())
        await self._first.wait()

    def end_all(self, reason: str) -> None:
        """Whatever is still under way ends with this error."""
        self._ending = True
        for live in self._hub.live:
            if live.engine is not None:
                live.engine.abort([live.engine_id])
            self._fail(live, reason)

    def close(self) -> None:
        self._end.close()

    async def submit(self, requests: list[LiveRequest]) -> None:
        """Opens their streams and sends them to one engine: all of them or none. Raises what the engine raised, or
        EngineDeadError when none can be asked; then nothing runs anywhere."""
        refusal: ShoalError = EngineDeadError(f"The server is not ready: {self.trouble}.")
        tried: set[EngineLink] = set()
        while (link := self._choose(requests[0], tried)) is not None:
            try:
                await self._place(requests, link)
                return
            except (EngineDeadError, EngineGoneError, OverloadedError) as error:
                refusal = error
                tried.add(link)
        raise refusal

    def abort(self, requests: list[LiveRequest]) -> None:
        """Nobody waits for them any more. Does not wait for the engines."""
        by_link: dict[EngineLink, list[str]] = {}
        for live in requests:
            live.closed = True
            if live.engine is not None and not live.is_over:
                by_link.setdefault(live.engine, []).append(live.engine_id)
        for link, ids in by_link.items():
            link.abort(ids)

    async def metrics_text(self) -> str:
        """Of all engines that are well and answer soon. Raises EngineDeadError when none does."""
        ready = {name: link for name, link in self._links.items() if link.trouble is None}
        asked = (asyncio.wait_for(link.metrics_text(), _METRICS_TIMEOUT_S) for link in ready.values())
        answers = await asyncio.gather(*asked, return_exceptions=True)
        texts = {name: answer for name, answer in zip(ready, answers, strict=True) if isinstance(answer, str)}
        if not texts:
            raise EngineDeadError(f"No engine gives its metrics ({self.trouble or answers[0]}).")
        return join_metrics(texts)

    # Engines come and go --------------------------------------------------------------------------------------------

    async def _discover(self) -> None:
        while True:
            try:
                found = await self._find()
            except ShoalError as error:
                found = False
                logger.debug("no new engine: %s", error)
            except Exception:
                found = False
                logger.exception("looking for engines failed")
            if not found:
                await asyncio.sleep(self._config.heartbeat_s)

    async def _find(self) -> bool:
        """Attaches to an engine that is not known yet; False when there is none."""
        found = await self._directory.find(frozenset(self._links) | self._refused)
        if found is None:
            return False
        info, engine = found
        if self._info is not None and info.fingerprint != self._info.fingerprint:
            self._refused.add(info.instance_id)
            logger.error(
                "engine %s is refused: it is %s, and those here are %s (another model, context length or version)",
                *(info.instance_id, info.fingerprint, self._info.fingerprint),
            )
            return True
        link = EngineLink(self._end, engine, info)
        await link.attach()
        self._info = self._info or info
        self._first.set()
        self._links[info.instance_id] = link
        self._end.spawn(self._watch(link))
        self.count_attached()
        logger.info("engine %s is attached; %d in all", info.instance_id, len(self._links))
        return True

    async def _watch(self, link: EngineLink) -> None:
        await link.watch()
        del self._links[link.info.instance_id]
        self._affinity.forget(link)
        self._metrics.add("shoal_engines_lost_total")
        self.count_attached()
        logger.info("engine %s is gone; %d are left", link.info.instance_id, len(self._links))

    def _on_sign_of_life(self, status: EngineStatus) -> None:
        link = self._links.get(status.instance_id)
        if link is not None:
            link.on_sign_of_life(status)

    def count_attached(self) -> None:
        self._metrics.set("shoal_engines_attached", len(self._links))

    # Requests -------------------------------------------------------------------------------------------------------

    def _choose(self, live: LiveRequest, tried: Collection[EngineLink] = ()) -> EngineLink | None:
        ready = [link for link in self._links.values() if link.trouble is None and link not in tried]
        return self._affinity.choose(live.request, ready) if ready else None

    async def _place(self, requests: list[LiveRequest], link: EngineLink) -> None:
        """Raises as `EngineLink.submit`; the requests are nowhere then, and their next try has other ids."""
        for live in requests:
            live.engine = link
            self._hub.open(live)
        try:
            await link.submit(requests)
            if any(live.engine is not link for live in requests):
                link.abort([live.engine_id for live in requests])
                raise EngineDeadError("The engine stopped as it took the request.")
        except BaseException:
            for live in requests:
                self._detach(live)
            raise
        for live in requests:
            if live.closed:
                self._hub.close(live)
                link.abort([live.engine_id])

    def _detach(self, live: LiveRequest) -> None:
        self._hub.close(live)
        live.engine = None
        live.attempt += 1

    def _gave_back(self, live: LiveRequest, reason: str) -> bool:
        """An engine ended it, because it stops or is dead. True: it goes on elsewhere."""
        link = live.engine
        if link is None:
            return True  # another of its sequences has told so before
        link.doubt(reason)
        if link.is_submitting(live):
            live.engine = None  # its `_place` will see
            return True
        if not self._may_go_on(live):
            return False
        self._go_on(live, reason)
        return True

    def _lost(self, requests: list[LiveRequest], reason: str) -> None:
        for live in requests:
            if self._may_go_on(live):
                self._go_on(live, reason)
            else:
                self._fail(live, reason)

    def _may_go_on(self, live: LiveRequest) -> bool:
        if self._ending or live.continuations >= self._config.max_continuations:
            return False
        others = (link for link in self._links.values() if link is not live.engine)
        return self._directory.may_grow or any(link.trouble is None for link in others)

    def _go_on(self, live: LiveRequest, reason: str) -> None:
        self._detach(live)
        live.continuations += 1
        self._end.spawn(self._continue(live, reason))

    async def _continue(self, live: LiveRequest, reason: str) -> None:
        """Finds an engine for a request that has lost its own. Its stream waits meanwhile, and may be closed."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.continuation_timeout_s
        while not (live.closed or self._ending) and loop.time() < deadline:
            link = self._choose(live)
            if link is not None:
                try:
                    await self._place([live], link)
                    self._metrics.add("shoal_continuations_total", 1, ("continued",))
                    return
                except OverloadedError as error:
                    logger.debug("a request that has to go on waits: %s", error)
                except (EngineGoneError, EngineDeadError) as error:
                    link.doubt(str(error))
                except ShoalError as error:
                    reason = error.message
                    break
            await asyncio.sleep(min(_RETRY_S, self._config.heartbeat_s))
        if not live.closed:
            self._fail(live, reason)

    def _fail(self, live: LiveRequest, reason: str) -> None:
        self._hub.close(live)
        self._metrics.add("shoal_continuations_total", 1, ("failed",))
        live.stream.fail(EngineDeadError(f"The request cannot be finished: {reason.rstrip('.')}."))
