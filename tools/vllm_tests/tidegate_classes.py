"""A pytest plugin: vLLM's tests find Tidegate's scheduler classes where they look for vLLM's."""

from vllm.v1.core.sched import async_scheduler, scheduler

from tidegate_engine.scheduler import TidegateAsyncScheduler, TidegateScheduler

scheduler.Scheduler = TidegateScheduler
async_scheduler.AsyncScheduler = TidegateAsyncScheduler
