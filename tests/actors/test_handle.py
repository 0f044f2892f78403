"""Handles resolve alike whoever drives the loop, chain, and never wait without an end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading

import pytest

from cosmos_actor.actors.handle import Handle, InlineDriver, ThreadDriver, settled
from cosmos_actor.bus.errors import DeadlineExceeded


@pytest.fixture(params=["thread", "inline"])
def driver(request):
    if request.param == "thread":
        made = ThreadDriver()
        yield made
        made.close()
        made.loop.close()
    else:
        loop = asyncio.new_event_loop()
        yield InlineDriver(loop)
        loop.close()


def handle(driver, coroutine, **options):
    return Handle(driver, coroutine, "the answer", deadline_s=options.pop("deadline_s", 5.0), **options)


async def value(number):
    await asyncio.sleep(0)
    return number


async def fails():
    raise ValueError("no")


async def never():
    await asyncio.Event().wait()


def test_a_handle_gives_its_value_however_often_it_is_asked(driver):
    answer = handle(driver, value(3))
    assert answer.resolve() == 3 and answer.resolve() == 3 and answer.done()


def test_an_error_comes_out_of_resolve(driver):
    answer = handle(driver, fails())
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            answer.resolve()


def test_a_handle_feeds_the_next_call(driver):
    first = handle(driver, value(20))

    async def doubled():
        return 2 * await settled(first) + await settled(2)

    assert handle(driver, doubled()).resolve() == 42


def test_a_wait_past_its_deadline_names_what_it_waited_for(driver):
    answer = handle(driver, never(), deadline_s=0.01)
    with pytest.raises(DeadlineExceeded, match=r"no answer to the answer.*run\.deadline_s"):
        answer.resolve()
    answer.cancel()
    with pytest.raises((asyncio.CancelledError, concurrent.futures.CancelledError)):
        answer.resolve(1.0)


def test_an_interrupted_wait_raises_the_interruption(driver):
    def interrupted():
        raise KeyError("lost")

    answer = handle(driver, never(), interrupted=interrupted)
    with pytest.raises(KeyError, match="lost"):
        answer.resolve()
    answer.cancel()


def test_the_thread_driver_computes_elsewhere_and_the_inline_driver_here(driver):
    async def where():
        return threading.current_thread() is threading.main_thread()

    assert handle(driver, where()).resolve() is isinstance(driver, InlineDriver)


def test_a_failure_that_nobody_resolves_is_not_printed_when_all_is_over(driver, caplog):
    ended = handle(driver, fails())
    driver.wait(ended._future, 5.0)
    del ended
    gc.collect()
    assert caplog.records == []
