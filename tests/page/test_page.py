"""The page as Chromium shows it, over a real server on the fake engine."""

from __future__ import annotations

import base64
import io
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from page.browser import CHROMIUM, KEY, answer_to, prompt_with, server
from PIL import Image
from web import png

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")

expect.set_options(timeout=60_000)


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server(chat=True, step_s=0.01, host_bytes=1 << 20) as found:
        yield found


@pytest.fixture
def opened(browser) -> Iterator:
    """Opens pages; in the end none had an error in its console or asked another host."""
    contexts, faults = [], []

    def open_page(url: str, allowed: str = "$^", **options):
        context = browser.new_context(**{"reduced_motion": "reduce", **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("console", lambda m: m.type in ("error", "warning") and not re.search(allowed, m.text)
                and faults.append(m.text))  # fmt: skip
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda r: r.url.startswith(url.partition("#")[0]) or faults.append(r.url))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not faults


def number(page, name: str):
    return page.locator(f'[data-name="{name}"]')


def ask(page, text: str) -> None:
    page.fill("#ask", text)
    expect(page.locator(".send")).to_be_enabled()  # Enter before the page knows the model sends nothing
    page.press("#ask", "Enter")


def last_answer(page):
    return page.locator(".turn.assistant").last


def test_status_numbers_change_while_requests_run(opened, url):
    page = opened(url)
    expect(number(page, "state")).to_have_text("serving")
    expect(number(page, "model")).to_have_text("fake")
    expect(number(page, "running")).to_have_text("0")
    expect(page.locator(".chart canvas")).to_have_count(6)
    expect(page.locator("[data-tier]")).to_have_count(2)
    body = {"prompt": "x" * 200, "max_tokens": 500, "ignore_eos": True}
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=120) for _ in range(3)]
        expect(number(page, "running")).to_have_text("3")
        expect(number(page, "rate")).to_have_text(re.compile("[1-9]"))
        expect(number(page, "first")).to_have_text(re.compile("[1-9].* ms"))
        expect(number(page, "gap")).to_have_text(re.compile("[1-9].* ms"))
        assert all(call.result().status_code == 200 for call in calls)
    expect(number(page, "running")).to_have_text("0")
    assert int(number(page, "generated").inner_text().replace(",", "")) >= 1500


def test_a_chat_streams_its_text_as_text(opened, url):
    page = opened(f"{url}/#chat")
    prompt = "<img src=x onerror=alert(1)> **bold** [a](javascript:1)"
    ask(page, prompt)
    expect(last_answer(page).locator(".counts")).to_contain_text("tokens; prompt")
    expect(page.locator(".turn.user .text")).to_have_text(prompt)
    expect(last_answer(page)).to_have_attribute("aria-busy", "false")
    assert last_answer(page).locator(".text").evaluate("e => e.textContent") == answer_to(prompt)
    assert page.locator("main img, main b b, main a").count() == 0
    page.fill("#ask", "one")
    page.press("#ask", "Shift+Enter")
    page.type("#ask", "two")
    assert page.input_value("#ask") == "one\ntwo"
    page.click(".clear")
    expect(page.locator(".turn")).to_have_count(0)


DROP = """([text, kind]) => {
  const data = new DataTransfer(), bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  data.items.add(new File([bytes], "a.png", { type: "image/png" }));
  const target = kind === "paste" ? document.getElementById("ask") : document.body;
  const more = { bubbles: true, cancelable: true };
  target.dispatchEvent(kind === "paste" ? new ClipboardEvent("paste", { clipboardData: data, ...more })
    : new DragEvent("drop", { dataTransfer: data, ...more }));
}"""


def test_images_that_are_dropped_pasted_and_attached_are_answered(opened, url):
    with server(chat=True, images=True) as seeing:
        page = opened(f"{seeing}/#chat")
        expect(page.locator("#keys")).to_contain_text("16 in a conversation")
        for count, kind in enumerate(("drop", "paste"), 1):
            page.evaluate(DROP, [base64.b64encode(png(count)).decode(), kind])
            expect(page.locator(".ask .pictures img")).to_have_count(count)
        page.set_input_files(".attach input", {"name": "b.png", "mimeType": "image/png", "buffer": png(3)})
        expect(page.locator(".ask .pictures img")).to_have_count(3)
        page.click("[aria-label='Remove image 2']")
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, "hello")
        parts = sent.value.post_data_json["messages"][0]["content"]
        sent_files = [base64.b64decode(part["image_url"]["url"].partition(",")[2]) for part in parts[:2]]
        assert sent_files == [png(1), png(3)] and parts[2] == {"type": "text", "text": "hello"}
        expect(last_answer(page)).to_have_attribute("aria-busy", "false")
        said = last_answer(page).locator(".text").evaluate("e => e.textContent")
        assert said == answer_to("<start_of_image><start_of_image>hello")
        expect(page.locator(".turn.user .pictures img")).to_have_count(2)
        assert page.locator(".pictures img").first.evaluate("e => e.naturalWidth") == 8
        page.evaluate(DROP, [base64.b64encode(png(4)).decode(), "drop"])
        expect(page.locator(".ask .pictures img")).to_have_count(1)
        page.click(".send")
        expect(page.locator(".turn.assistant")).to_have_count(2)
        expect(last_answer(page)).to_have_attribute("aria-busy", "false")
        again = last_answer(page).locator(".text").evaluate("e => e.textContent")
        assert again == answer_to(f"<start_of_image><start_of_image>hello{said}<start_of_image>")
        large = io.BytesIO()
        Image.frombytes("RGB", (2400, 300), random.Random(1).randbytes(3 * 2400 * 300)).save(large, "PNG")
        page.set_input_files(".attach input", {"name": "c.png", "mimeType": "image/png", "buffer": large.getvalue()})
        expect(page.locator(".ask .pictures img")).to_have_count(1)
        assert page.locator(".ask .pictures img").evaluate("e => [e.naturalWidth, e.naturalHeight]") == [1792, 224]
        page.close()
    page = opened(f"{url}/#chat")
    expect(page.locator(".attach")).to_have_count(0)
    page.evaluate(DROP, [base64.b64encode(png(1)).decode(), "drop"])
    expect(page.locator(".ask .error")).to_contain_text("text alone")


@pytest.mark.long
def test_stop_ends_the_request_on_the_server(opened, url):
    page = opened(f"{url}/#chat")
    ask(page, prompt_with(450))
    expect(last_answer(page).locator(".text")).to_have_text(re.compile(".{10}"))
    running = lambda: httpx.get(f"{url}/status").json()["requests_open"]  # noqa: E731
    assert running() == 1
    page.click(".stop")
    expect(last_answer(page).locator(".counts")).to_contain_text("stopped")
    for _ in range(3000):
        if not running():
            break
        page.wait_for_timeout(10)
    assert running() == 0
    got = last_answer(page).locator(".text").evaluate("e => e.textContent")
    assert got and answer_to(prompt_with(450)).startswith(got) and len(got) < 450
    expect(last_answer(page).locator(".retry")).to_be_visible()
    assert page.evaluate("document.activeElement.id") == "ask"


@pytest.mark.long
def test_a_failed_answer_can_be_tried_again(opened, url):
    page = opened(f"{url}/#chat", allowed="503")
    error = '{"error": {"message": "<b>busy</b>", "type": "x", "param": null, "code": null}}'
    page.route("**/v1/chat/completions", lambda r: r.fulfill(status=503, body=error, content_type="application/json"))
    ask(page, "hello")
    expect(last_answer(page).locator(".error")).to_have_text("<b>busy</b>")
    page.unroute("**/v1/chat/completions")
    page.click(".retry")
    expect(last_answer(page)).to_have_attribute("aria-busy", "false")
    expect(page.locator(".turn")).to_have_count(2)
    assert last_answer(page).locator(".text").evaluate("e => e.textContent") == answer_to("hello")


@pytest.mark.long
def test_settings_are_sent_and_text_goes_on_without_a_template(opened):
    with server(chat=False) as url:
        page = opened(f"{url}/#chat")
        expect(page.locator("#base")).to_contain_text("no chat template")
        page.click("summary")
        page.fill("[name=max_tokens]", "3")
        page.fill("[name=temperature]", "0")
        page.fill("[name=seed]", "7")
        with page.expect_request("**/v1/completions") as sent:
            ask(page, "hello")
        body = sent.value.post_data_json
        assert (body["max_tokens"], body["temperature"], body["seed"], body["top_p"]) == (3, 0, 7, 0.95)
        expect(last_answer(page)).to_have_attribute("aria-busy", "false")
        first = last_answer(page).locator(".text").evaluate("e => e.textContent")
        with page.expect_request("**/v1/completions") as sent:
            ask(page, "more")
        prompt = sent.value.post_data_json["prompt"]
        assert re.sub(r"\s", "", prompt) == re.sub(r"\s", "", f"hello{first}more") and prompt.startswith("hello")
        page.close()  # before the server, which it asks every second


@pytest.mark.long
def test_a_key_is_asked_for_and_kept_in_the_tab(opened):
    with server(chat=True, server={"api_key": KEY}) as url:
        page = opened(url, allowed="401")
        expect(page.locator("[name=key]")).to_be_focused()
        page.fill("[name=key]", "a-wrong-key-of-some-length")
        page.keyboard.press("Enter")
        expect(page.locator("#why")).to_contain_text("does not take this key")
        page.fill("[name=key]", KEY)
        page.keyboard.press("Enter")
        expect(number(page, "state")).to_have_text("serving")
        assert page.evaluate("Object.values(sessionStorage)") == [KEY]
        assert KEY not in page.evaluate("JSON.stringify(localStorage) + document.cookie + location.href")
        page.reload()
        expect(number(page, "state")).to_have_text("serving")
        page.goto(f"{url}/#chat")
        ask(page, "hello")
        expect(last_answer(page).locator(".text")).to_have_text(re.compile("."))
        page.click(".forget")
        expect(page.locator("[name=key]")).to_be_visible()
        assert page.evaluate("sessionStorage.length") == 0
        page.close()


@pytest.mark.long
def test_a_phone_shows_both_views_without_sideways_scroll(opened, url):
    page = opened(url, viewport={"width": 360, "height": 640})
    expect(page.locator(".chart canvas")).to_have_count(6)
    wide = "document.documentElement.scrollWidth"
    assert page.evaluate(wide) <= 360
    page.click("nav >> text=Chat")
    page.click("summary")
    ask(page, "x" * 300)
    expect(last_answer(page).locator(".counts")).to_contain_text("tokens")
    assert page.evaluate(wide) <= 360


@pytest.mark.long
def test_the_keyboard_alone_is_enough(opened, url):
    page = opened(url)
    expect(number(page, "state")).to_have_text("serving")
    seen = set()
    for _ in range(30):
        page.keyboard.press("Tab")
        focus = page.evaluate(
            "() => { const e = document.activeElement, s = getComputedStyle(e);"
            " return [e.textContent.trim() || e.id, s.outlineStyle, parseFloat(s.outlineWidth)]; }"
        )
        assert focus[0] == "" or (focus[1] != "none" and focus[2] >= 2), focus
        seen.add(focus[0])
        if focus[0] == "Chat":
            page.keyboard.press("Enter")
        if page.evaluate("document.activeElement.id") == "ask":
            break
    assert {"Status", "Chat", "Settings"} <= seen
    page.keyboard.type("hello")
    page.keyboard.press("Enter")
    expect(page.locator("p[role=status]")).to_contain_text("Answer finished")
    assert last_answer(page).locator(".text").evaluate("e => e.textContent") == answer_to("hello")
    page.keyboard.type(prompt_with(450))
    page.keyboard.press("Enter")
    expect(page.locator(".stop")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("p[role=status]")).to_contain_text("Stopped")
    unnamed = "[...document.querySelectorAll('input, textarea, button, meter')].filter((e) => !e.labels?.length"
    assert page.evaluate(f"{unnamed} && !e.ariaLabel && !e.textContent.trim()).length") == 0


@pytest.mark.long
def test_dark_follows_the_system_until_it_is_chosen(opened, url):
    back = "getComputedStyle(document.documentElement).backgroundColor"
    page = opened(url, color_scheme="dark")
    assert page.evaluate(back) == "rgb(20, 23, 28)"
    page.emulate_media(color_scheme="light")
    assert page.evaluate(back) == "rgb(255, 255, 255)"
    page.click(".theme")
    expect(page.locator(".theme")).to_have_attribute("aria-pressed", "true")
    assert page.evaluate(back) == "rgb(20, 23, 28)"
    page.reload()
    assert page.evaluate(back) == "rgb(20, 23, 28)"
