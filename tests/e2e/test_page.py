"""The page with a real model, and its picture for the documents.

PEAGLE_PICTURE=docs/page.png python -m pytest -m slow tests/e2e/test_page.py      # takes the picture anew
"""

import os
from pathlib import Path

import pytest

from peagle.engine.engine import LLM
from tests.e2e.test_shipped_head import HEAD
from tests.server.browser import chromium
from tests.server.serving import serving, wait_for
from tests.server.test_page import Page

QUESTION = "Write a Python function that returns the n-th Fibonacci number."


@pytest.mark.slow
def test_the_page_with_a_real_model(tmp_path: Path):
    with chromium(tmp_path / "profile", size=(1000, 1000)) as driver:
        from selenium.webdriver import ActionChains

        config = {"method": "eagle3", "model": str(HEAD), "num_speculative_tokens": 5, "parallel_drafting": True}
        llm = LLM("smollm2-135m", speculative_config=config, max_model_len=1024, max_num_seqs=4)
        with serving(llm) as served:
            page = Page(driver, served.url)
            page.set("max-tokens", 120)
            page.at("settings").find_element("tag name", "summary").click()
            page.send(QUESTION)
            wait_for(lambda: page.text("status").startswith("done"), 120)
            assert float(page.text("length")) > 2
            page.at("measure").click()
            wait_for(lambda: page.text("status").startswith("measured"), 120)
            assert "the same tokens as with drafts" in page.text("status")
            driver.execute_script("document.getElementById('talk').scrollTop = 0")
            ActionChains(driver).move_to_element(page.all(".turn .corrected")[1]).perform()
            wait_for(lambda: page.at("about").is_displayed())
            assert page.console() == []
            picture = Path(os.environ.get("PEAGLE_PICTURE", tmp_path / "page.png"))
            assert driver.save_screenshot(str(picture))
    assert 10_000 < picture.stat().st_size < 200_000
