"""Random histories of one vLLM scheduler class, with the facts of each step, for tests that compare two classes.

A `History` decides everything by its seed and by the state of the scheduler, never by the class. Features are switched on
by name, and the pieces of vLLM outside the scheduler (connector, grammars, drafts) have doubles here.
"""

import random
from collections import deque
from types import SimpleNamespace

from vllm.config import LoRAConfig, SpeculativeConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tidegate_policy.cost import CostModel
from tidegate_sim import virtual_engine as engine

TIGHT = CostModel(step_s=0.02, prefill_s=1e-4, kv_tokens=900, max_batch=8, max_step_tokens=96)
"""So little KV that running requests are preempted all the time."""
DRAFTS = 3
LORAS = 3


class Connector:
    """A KV connector: some prompts are found outside and loaded, and the blocks of some ended requests are sent first."""

    supports_divergent_local_hybrid_hits = False
    requires_kv_delivery = False

    def __init__(self, seed):
        self._seed = seed
        self.loading, self.sending = set(), set()
        self._known = set()

    def _draw(self, request, what):
        return random.Random(f"{self._seed} {request.request_id} {what}").random()

    def get_num_new_matched_tokens(self, request, computed):
        if request.request_id not in self._known and self._draw(request, "late") < 0.3:
            self._known.add(request.request_id)
            return None, False
        found = request.num_prompt_tokens // 16 * 16 - 16
        if found <= computed or request.num_preemptions or self._draw(request, "found") < 0.5:
            return 0, False
        return found - computed, self._draw(request, "async") < 0.7

    def update_state_after_alloc(self, request, blocks, external):
        if external and request.num_preemptions == 0 and self._draw(request, "async") < 0.7:
            self.loading.add(request.request_id)

    def request_finished(self, request, block_ids):
        keep = self._draw(request, "send") < 0.5
        if keep:
            self.sending.add(request.request_id)
        return keep, None

    def build_connector_meta(self, output):
        return None

    def on_new_request(self, request): ...

    def update_connector_output(self, output): ...

    def take_events(self):
        return ()

    def get_kv_connector_stats(self):
        return None

    def get_loaded_kv_cache_group_ids(self, request):
        return ()

    def has_pending_block_frees(self):
        return False

    def has_pending_push_work(self):
        return False

    def reset_cache(self):
        return True

    def shutdown(self): ...


class Grammars:
    """Accepts all tokens."""

    def accept_tokens(self, request, tokens):
        return True

    def validate_tokens(self, request, tokens):
        return list(tokens)


def build(scheduler_class, *, features=(), limits=TIGHT, seed=0, scheduling="fcfs", **ours):
    def constructed(vllm_config, **kwargs):
        if "drafts" in features:
            vllm_config.speculative_config = SpeculativeConfig(
                method="ngram",
                num_speculative_tokens=DRAFTS,
                prompt_lookup_max=3,
                prompt_lookup_min=1,
                target_model_config=vllm_config.model_config,
                target_parallel_config=vllm_config.parallel_config,
            )
        return scheduler_class(vllm_config=vllm_config, **kwargs, **ours)

    scheduler = engine.build(constructed, limits, scheduling=scheduling)
    scheduler.structured_output_manager = Grammars()
    if "loras" in features:
        scheduler.lora_config = LoRAConfig(max_loras=1)
    if "connector" in features:
        scheduler.connector = Connector(seed)
    scheduler.defer_block_free = "deferred frees" in features
    return scheduler


class History:
    """One run. `ahead`: steps that are scheduled before the output of an earlier one comes back."""

    def __init__(self, scheduler, seed, *, features=(), ahead=0, requests=40):
        self.scheduler = scheduler
        self.rng = random.Random(seed)
        self.features = features
        self.ahead = ahead
        self.ends, self.steps, self.inflight = {}, [], deque()
        self.chunks = {}
        arrivals = [(self.rng.randrange(60), index) for index in range(requests)]
        self.arrivals = deque(sorted(arrivals))

    def run(self):
        for step in range(4000):
            self._arrive(step)
            self._disturb(step)
            if not self.arrivals and not self.scheduler.has_requests() and not self.inflight and not self._sessions():
                return self.steps
            self._step()
        raise AssertionError(f"the history never ended: {self.scheduler.requests}")

    def _step(self):
        scheduler = self.scheduler
        output = scheduler.schedule()
        self.steps.append(facts(output, scheduler))
        self.inflight.append((output, engine.producing(output, scheduler.requests)))
        while len(self.inflight) > self.ahead or (self.inflight and not output.total_num_scheduled_tokens):
            past, produced = self.inflight.popleft()
            outputs = scheduler.update_from_output(past, self._forward(past, produced))
            self.steps[-1]["outputs"] = [
                (each.request_id, list(each.new_token_ids), each.finish_reason)
                for index in sorted(outputs)
                for each in outputs[index].outputs
            ]
            if "drafts" in self.features and self.ahead == 0:
                self._draft(past)

    def _forward(self, output, produced):
        sampled = {name: [] for name in output.num_scheduled_tokens}
        for name in produced:
            request = self.scheduler.requests.get(name)
            if request is None:
                continue
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            count = 1 + (len(name) + request.num_output_tokens) % (drafts + 1)
            left = self.ends[name] - request.num_output_tokens
            sampled[name] = [engine.WORD] * count if left > count else [engine.WORD] * max(left - 1, 0) + [engine.STOP]
        model = ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={name: index for index, name in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
        )
        if "connector" in self.features:
            connector = self.scheduler.connector
            # A request that was aborted while it loaded is reported like any other.
            loaded = {name for name in sorted(connector.loading) if self.rng.random() < 0.4}
            sent = {name for name in sorted(connector.sending - connector.loading) if self.rng.random() < 0.4}
            connector.loading -= loaded
            connector.sending -= sent
            alive = self.scheduler.requests
            model.kv_connector_output = KVConnectorOutput(
                finished_sending={name for name in sent if name in alive},
                finished_recving={name for name in loaded if name in alive and self._loads(alive[name])},
            )
        return model

    @staticmethod
    def _loads(request):
        return request.status == RequestStatus.WAITING_FOR_REMOTE_KVS or request.is_finished()

    def _draft(self, output):
        names = [name for name in output.num_scheduled_tokens if name in self.scheduler.requests]
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, [[engine.WORD] * DRAFTS for _ in names]))

    def _arrive(self, step):
        while self.arrivals and self.arrivals[0][0] <= step:
            at, index = self.arrivals.popleft()
            self._add(f"r{index:02}", at + index / 1000)

    def _add(self, name, arrival_s):
        rng = self.rng
        self.ends[name] = rng.randrange(1, 100)
        streaming = "sessions" in self.features and rng.random() < 0.4
        if streaming:
            self.chunks[name] = rng.randrange(1, 4)
        request = made(
            name,
            rng.randrange(1, 250),
            arrival_s=arrival_s,
            priority=rng.randrange(-2, 3),
            resumable=streaming,
            structured="grammars" in self.features and rng.random() < 0.4,
            lora=rng.randrange(LORAS + 1) if "loras" in self.features else 0,
        )
        self.scheduler.add_request(request)

    def _sessions(self):
        return [name for name in self.chunks if name in self.scheduler.requests]

    def _disturb(self, step):
        scheduler, rng = self.scheduler, self.rng
        for request in [*scheduler.waiting, *scheduler.kv_holding_waiting]:
            structured = request.structured_output_request
            if structured is not None and structured.grammar is None and rng.random() < 0.1:
                broken = "errors" in self.features and rng.random() < 0.3
                structured.grammar = ValueError("no grammar") if broken else SimpleNamespace()
        for name in self._sessions():
            if scheduler.requests[name].status == RequestStatus.WAITING_FOR_STREAMING_REQ and rng.random() < 0.3:
                self.chunks[name] -= 1
                more = self.chunks[name] > 0
                self.ends[name] = rng.randrange(1, 30)
                prompt = rng.randrange(1, 40) if more else 1
                scheduler.add_request(made(name, prompt, arrival_s=step + 100.0, resumable=more, closing=not more))
        if "aborts" in self.features and rng.random() < 0.08 and scheduler.requests:
            victims = rng.sample(sorted(scheduler.requests), min(len(scheduler.requests), rng.randrange(1, 3)))
            scheduler.finish_requests(victims, RequestStatus.FINISHED_ABORTED)
        if "resets" in self.features and rng.random() < 0.05:
            try:
                self.steps.append({"reset": scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.7)})
            except RuntimeError as error:
                self.steps.append({"reset": str(error)})
        if "pauses" in self.features and step < 200 and rng.random() < 0.1:
            scheduler.set_pause_state(rng.choice(list(PauseState)))
        elif "pauses" in self.features and step >= 200:
            scheduler.set_pause_state(PauseState.UNPAUSED)


def made(name, prompt, *, arrival_s, priority=0, resumable=False, structured=False, lora=0, closing=False):
    params = SamplingParams(max_tokens=500, stop_token_ids=[engine.STOP])
    if structured:
        params.structured_outputs = StructuredOutputsParams(json="{}")
    number = sum(map(ord, name))
    return Request(
        name,
        [] if closing else [2 + number % 5] * prompt,
        params,
        None,
        arrival_time=arrival_s,
        priority=priority,
        resumable=resumable,
        lora_request=LoRARequest(f"lora{lora}", lora, "somewhere") if lora else None,
        block_hasher=engine._block_hasher(),
    )


def facts(output, scheduler):
    cached = output.scheduled_cached_reqs
    return {
        "tokens": list(output.num_scheduled_tokens.items()),
        "drafts": dict(output.scheduled_spec_decode_tokens),
        "new": [(new.req_id, new.num_computed_tokens, new.block_ids) for new in output.scheduled_new_reqs],
        "cached": list(zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)),
        "resumed": sorted(cached.resumed_req_ids),
        "preempted": sorted(output.preempted_req_ids or ()),
        "finished": sorted(output.finished_req_ids),
        "counts": (*scheduler.get_request_counts(), scheduler.get_num_unfinished_requests()),
        "deferred": sorted(request.request_id for request in scheduler.deferred_waiting),
        "usage": scheduler.get_kv_cache_usage(),
        "capacity bound": scheduler.prefill_capacity_bound,
    }
