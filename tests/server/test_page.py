"""The page at / in headless Chromium, over a tiny engine whose drafts are right four times of five."""

import re
from dataclasses import replace

import pytest

from peagle.config import ServeConfig
from peagle.sampling import SamplingParams
from tests.engine.tiny import force_drafts
from tests.server.browser import chromium
from tests.server.serving import chat_llm, serving, wait_for
from tests.server.test_engine_thread import slow_steps
from tests.server.tiny_harmony import dictation, harmony_llm

HOSTILE = "<img src=x onerror=document.title='bad'>"


def page_llm():
    llm = chat_llm(k=3)
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    force_drafts(llm, chat_llm().generate(["uhelloA"], params), seed=1)
    return llm


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture(scope="module")
def served(browser):  # in this order: without a browser there is nothing to serve
    with serving(page_llm()) as served:
        yield served


class Page:
    """What a person does with the page, and what there is to see."""

    def __init__(self, driver, url: str) -> None:
        self.driver = driver
        driver.get_log("browser")
        driver.get(url)
        wait_for(lambda: self.text("model") or self.text("status"))

    def at(self, name: str):
        return self.driver.find_element("id", name)

    def text(self, name: str) -> str:
        return self.at(name).text

    def all(self, selector: str) -> list:
        return self.driver.find_elements("css selector", selector)

    def set(self, name: str, value: object) -> None:
        if not self.at(name).is_displayed():
            self.at("settings").find_element("tag name", "summary").click()
        self.at(name).clear()
        self.at(name).send_keys(str(value))

    def send(self, text: str) -> None:
        self.at("message").send_keys(text, "\ue007")  # Enter

    def ask(self, text: str) -> str:
        """Send and wait for the end; what the status line says then."""
        self.send(text)
        return self.ended()

    def ended(self) -> str:
        wait_for(lambda: self.text("status") not in ("", "answering"))
        return self.text("status")

    def console(self) -> list[str]:
        """What the browser complains about; breaches of the policy are among it."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture
def page(browser, served):
    page = Page(browser, served.url)
    yield page
    assert page.console() == []


def test_an_answer_and_where_its_tokens_came_from(page):
    page.set("max-tokens", 60)
    said = page.ask("hello")
    assert said.startswith("done")
    kinds = [token.get_attribute("class").removeprefix("token ") for token in page.all(".turn .token")]
    assert set(kinds) == {"plain", "accepted", "corrected", "bonus"}
    own = kinds.count("corrected") + kinds.count("bonus")
    lengths = [f"{1 + kinds.count('accepted') / rounds:.2f}" for rounds in (own, own + 1)]  # the end may cut a round
    assert f"acceptance length {page.text('length')}" in said
    assert page.text("length") in lengths
    assert float(page.text("speed")) > 0
    assert "".join(token.text for token in page.all(".turn .token")) == page.all(".turn p")[1].text
    colours = {page.all(f".turn .{kind}")[0].value_of_css_property("background-color") for kind in set(kinds)}
    assert len(colours) == 4


def test_pointing_at_a_token_says_what_was_rejected(page):
    from selenium.webdriver import ActionChains

    page.set("max-tokens", 40)
    page.ask("hello")
    assert not page.at("about").is_displayed()
    token = page.all(".turn .corrected")[0]
    ActionChains(page.driver).move_to_element(token).perform()
    wait_for(lambda: page.at("about").is_displayed())
    said = page.text("about")
    assert re.search(r"""the target's own\. Draft [123] was "[^"]+": rejected""", said), said
    assert f'"{token.text}"' in said
    ActionChains(page.driver).move_to_element(page.all(".turn .accepted")[0]).perform()
    wait_for(lambda: re.search(r"draft [123] of its round, accepted", page.text("about")))


def test_the_keyboard_is_enough(page):
    page.set("max-tokens", 30)
    page.ask("hello")
    tokens = page.all(".turn .token")
    assert [token.get_attribute("tabindex") for token in tokens].count("0") == 1
    page.driver.execute_script("arguments[0].focus()", tokens[0])
    for _ in range(3):
        page.driver.switch_to.active_element.send_keys("\ue014")  # right
    page.driver.switch_to.active_element.send_keys("\ue012")  # left
    assert page.driver.switch_to.active_element == tokens[2]
    assert page.at("about").is_displayed()
    tokens[2].send_keys("\ue00c")  # Escape
    assert not page.at("about").is_displayed()
    page.at("message").send_keys("two\ue008\ue007\ue000lines")  # Shift+Enter
    assert page.at("message").get_attribute("value") == "two\nlines"


def test_the_figure_without_drafts_is_measured(page):
    page.set("max-tokens", 60)
    assert not page.at("measure").is_enabled()
    page.ask("hello")
    page.at("measure").click()
    wait_for(lambda: page.text("status").startswith("measured"))
    assert "the same tokens as with drafts" in page.text("status")
    ratio = float(page.text("speed")) / float(page.text("plain"))
    assert float(page.text("ratio").removeprefix("× ")) == pytest.approx(ratio, abs=0.02)
    with_drafts, without = (section.text for section in page.all(".turn.assistant"))
    assert "acceptance length" in with_drafts
    assert "no drafts" in without
    page.send("again")
    page.ended()
    assert page.text("plain") == "–"  # of another prompt


@pytest.mark.parametrize("way", ["stop", "escape"])
def test_an_answer_can_be_stopped(page, served, way):
    with slow_steps(served.engine):
        page.send("hello")
        wait_for(lambda: page.all(".turn .token"))
        assert not page.at("send").is_enabled()
        page.at("stop").click() if way == "stop" else page.at("message").send_keys("\ue00c")
        assert page.ended() == "stopped"
        wait_for(lambda: served.engine.snapshot().num_running == 0)
    assert page.at("send").is_enabled()
    assert page.all(".turn .token")  # what was said stays


def test_markup_is_text(page):
    page.set("max-tokens", 3)
    page.ask(HOSTILE)
    assert page.all(".turn.user p")[0].text == HOSTILE
    assert page.driver.title == "peagle"
    assert not page.all(".turn img")


def test_errors_are_said_and_the_page_goes_on(browser, served):
    page = Page(browser, served.url)
    assert "tokens: the context of 128 leaves no room" in page.ask("x" * 200)
    assert page.all(".turn .error")
    page.set("max-tokens", 3)
    assert page.ask("hello").startswith("done")
    assert all("status of 400" in line for line in page.console())


def test_a_conversation_goes_on_and_begins_anew(page):
    page.set("max-tokens", 3)
    page.ask("a")
    page.ask("b")
    assert len(page.all(".turn")) == 4
    page.at("reset").click()
    assert not page.all(".turn")
    assert page.at("welcome").is_displayed()
    assert not page.at("measure").is_enabled()


def test_a_key_is_asked_for(browser):
    config = ServeConfig(api_key="secret", served_model_name=HOSTILE)
    with serving(page_llm(), config) as served:
        page = Page(browser, served.url)
        assert "wants an API key" in page.text("status")
        page.set("key", "wrong")
        assert "API key is missing or wrong" in page.ask("hello")
        page.set("key", "secret")
        page.set("max-tokens", 3)
        assert page.text("model").startswith(HOSTILE)
        assert page.ask("hello").startswith("done")
        assert page.driver.title == "peagle"
        assert all("401" in line for line in page.console())


def test_headers_of_gpt_oss_are_not_shown_and_thoughts_look_different(browser, monkeypatch):
    pytest.importorskip("xgrammar")
    llm = harmony_llm(3)
    said = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>hello<|return|>"
    make, form = llm.make_request, dictation(llm.tokenizer, said)

    def dictated(prompt, params, **rest):
        return make(prompt, replace(params, structured_outputs=form), **rest)

    monkeypatch.setattr(llm, "make_request", dictated)
    with serving(llm) as served:
        page = Page(browser, served.url)
        assert page.ask("hi").startswith("done: ")
        assert "".join(token.text for token in page.all(".turn .token.thought")) == "hm"
        assert "".join(token.text for token in page.all(".turn .token:not(.thought)")) == "hello"


def test_phone_and_dark(page):
    driver = page.driver
    light = page.driver.find_element("tag name", "body").value_of_css_property("background-color")
    try:
        device = {"width": 360, "height": 640, "deviceScaleFactor": 1, "mobile": True}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", device)
        dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
        page.set("max-tokens", 60)
        page.ask("hello" * 10)
        width = driver.execute_script("return document.documentElement.scrollWidth")
        assert width <= 360
        for name in ("message", "send", "stop", "talk"):
            box = page.at(name).rect
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 360
            assert box["y"] + box["height"] <= 640
        assert page.driver.find_element("tag name", "body").value_of_css_property("background-color") != light
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
