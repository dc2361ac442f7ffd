"""The status page in a real headless browser, before a real gateway with fake engines."""

import asyncio
import hashlib
import pathlib
from typing import Any

import chromium_page
import pytest
import yaml

import fake_engine

pytestmark = pytest.mark.skipif(
    chromium_page.PROGRAM is None, reason="no Chromium here; install Debian's package chromium"
)
HOSTILE = '<img src=x onerror="window.broken=1"><script>window.broken=1</script>'


async def test_the_page_shows_data_and_changes_while_calls_run_without_errors_or_foreign_requests(up: Any) -> None:
    async with (
        fake_engine.engine(tokens=40, token_s=0.05) as engine,
        up(engine, classes=[{"name": "chat", "deadline": "10s"}]) as client,
        chromium_page.page() as page,
    ):
        await page.open(client.url + "/")
        await page.until("document.getElementById('engines').innerText.includes('serves')")
        assert "ready" in await page.text("status")
        running = [
            asyncio.create_task(
                client.ask(
                    headers={
                        "x-tidegate-class": "chat",
                        "x-tidegate-tenant": "acme",
                        "x-tidegate-workflow": f"flow-{index}",
                        "x-tidegate-stage": "plan",
                        "x-tidegate-deadline-ms": "20000",
                    },
                    stream=False,
                )
            )
            for index in range(3)
        ]
        await page.until("document.querySelector('#engines tbody').innerText.includes('3 /')")
        await page.until("document.getElementById('workflows').innerText.includes('flow-2')")
        assert {status for status, _, _ in await asyncio.gather(*running)} == {200}
        await client.send("POST", "/v1/workflows/flow-1/complete", headers={"x-tidegate-tenant": "acme"})
        await page.until("document.getElementById('workflows').innerText.includes('met')")
        await page.until("document.getElementById('classes').innerText.includes('100%')")
        await page.until("document.getElementById('tenants').innerText.includes('acme')")
        assert "acme" in await page.text("recent")

        await client.gateway.policy.choose(
            "steered",
            "sjf",
            reason="overload: as the test says",
            for_s=None,
            alternatives=("two-lane", "edf"),
            expected="long calls wait",
        )
        switch = await page.until("(t => t.includes('sjf') && t)(document.getElementById('switches').innerText)")
        assert "urgency → sjf" in switch
        assert "overload: as the test says" in switch
        assert "two-lane, edf" in switch
        assert "long calls wait" in switch
        shown = client.state()["policy"]["switches"][0]
        assert shown["evidence"] in switch
        assert shown["effect"].partition(" (first")[0] in switch

        assert page.errors == []
        assert {address.partition("://")[2].partition("/")[0] for address in page.requests} == {client.url[7:]}


async def test_a_request_in_the_box_streams_its_answer_with_its_facts(up: Any) -> None:
    async with (
        fake_engine.engine(tokens=30, token_s=0.05) as engine,
        up(engine) as client,
        chromium_page.page() as page,
    ):
        await page.open(client.url + "/")
        await page.until("!document.getElementById('request-section').hidden")
        await page.value("document.getElementById('deadline').value = '30000'; document.getElementById('send').click()")
        await page.until("document.getElementById('answer').textContent.includes('w2')")
        assert "done" not in await page.text("answer-facts")
        facts = await page.until("(t => t.includes('done') && t)(document.getElementById('answer-facts').textContent)")
        assert "w29" in await page.text("answer")
        assert f"engine {engine.url[7:]}, queue " in facts
        assert " ms, slack " in facts

        await page.value("document.getElementById('prompt').value = ''; document.getElementById('send').click()")
        assert engine.served == 1, "an empty prompt is not sent"
        assert page.errors == []


async def test_names_from_clients_and_engines_do_not_become_markup(up: Any) -> None:
    async with (
        fake_engine.engine(model=HOSTILE) as plain,
        up({"url": plain.url, "name": HOSTILE, "nodePool": HOSTILE}) as client,
        chromium_page.page() as page,
    ):
        headers = {
            "x-tidegate-tenant": HOSTILE,
            "x-tidegate-workflow": "w",
            "x-tidegate-stage": "s",
            "x-tidegate-deadline-ms": "20000",
        }
        assert (await client.ask(model=HOSTILE, headers=headers))[0] == 200
        await client.gateway.policy.choose("override", "edf", reason=HOSTILE, for_s=60)
        await page.open(client.url + "/")
        for part in ("model", "engines", "tenants", "workflows", "recent", "switches"):
            await page.until(f"document.getElementById('{part}').innerText.includes('onerror')")
        assert await page.value("document.querySelectorAll('main img, main script').length") == 0
        assert await page.value("window.broken") is None
        assert page.errors == []


async def test_the_page_asks_for_a_key_and_shows_what_the_key_may_see(up: Any, tmp_path: pathlib.Path) -> None:
    keys = [
        {"sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant}
        for key, tenant in (("acme-0123456789", "acme"), ("all-0123456789", "*"))
    ]
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": keys}))

    async with (
        fake_engine.engine() as engine,
        up(engine, auth={"keysFile": str(path)}) as client,
        chromium_page.page() as page,
    ):
        for tenant in ("acme", "other"):
            headers = {"authorization": "Bearer all-0123456789", "x-tidegate-tenant": tenant}
            assert (await client.ask(headers=headers))[0] == 200
        await page.open(client.url + "/")
        await page.until("!document.getElementById('key-form').hidden")
        assert await page.value("document.getElementById('main').hidden")

        async def give(key: str) -> None:
            form = "document.getElementById('key-form').requestSubmit()"
            await page.value(f"document.getElementById('key').value = '{key}'; {form}")

        await give("acme-0123456789")
        await page.until("document.getElementById('tenants').innerText.includes('acme')")
        text = await page.value("document.body.innerText")
        assert "other" not in await page.text("tenants")
        assert "other" not in await page.text("recent")
        assert engine.url[7:] not in await page.text("engines")
        assert "Bearer" not in text
        await page.value("document.getElementById('send').click()")
        await page.until("document.getElementById('answer-facts').textContent.includes('done')")

        await page.value("document.getElementById('forget-key').click()")
        await page.until("!document.getElementById('key-form').hidden")
        await give("all-0123456789")
        await page.until("document.getElementById('tenants').innerText.includes('other')")
        await page.until("document.getElementById('engines').innerText.includes('serves')")


async def test_a_hundred_engines_can_be_sorted_and_filtered(up: Any) -> None:
    async with fake_engine.engine(host="0.0.0.0") as engine, fake_engine.engine(healthy=False) as ill:
        many = [
            {
                "url": ill.url if index == 77 else engine.url.replace("0.0.0.0", f"127.0.0.{index + 1}"),
                "name": f"engine-{index:03d}",
                "nodePool": f"pool-{index % 4}",
            }
            for index in range(100)
        ]
        async with up(*many, seen=False, health={"interval": "2s"}) as client, chromium_page.page(dark=True) as page:
            await page.open(client.url + "/")
            await page.until("document.getElementById('engine-counts').innerText.startsWith('99 of 100 serve')")
            first = "document.querySelector('#engines tbody tr').innerText"
            assert "engine-077" in await page.value(first), "trouble comes first"
            rows = "document.querySelectorAll('#engines tbody tr').length"
            assert await page.value(rows) < 100
            assert await page.value("document.querySelectorAll('#node-pools tbody tr').length") == 4
            await page.value("document.getElementById('engine-more').click()")
            assert await page.value(rows) == 100
            find = "document.getElementById('engine-filter')"
            await page.value(f"{find}.value = 'engine-042'; {find}.dispatchEvent(new Event('input'))")
            assert await page.value(rows) == 1
            assert page.errors == []
