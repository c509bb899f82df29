"""The page itself: one file, no network, and at work in a real browser."""

import json
import re
import shutil
import time

import numpy as np
import pytest

from heart_attention import HeartError
from heart_attention.evaluation import video
from heart_attention.evaluation.report import report

METHODS = ("dense", "xattention", "xattention+heart")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A results folder as `compare.run` leaves it, with made-up figures and real videos."""
    out = tmp_path_factory.mktemp("results")
    random, rows = np.random.default_rng(0), []
    for prompt in ("a <b>red</b> circle", "a blue square"):
        for i, method in enumerate(METHODS):
            frames = np.clip(random.normal(120 + 20 * i, 30, (16, 64, 64, 3)), 0, 255).astype(np.uint8)
            name = f"{method}-{len(rows)}"
            video.write_mp4(out / "videos" / f"{name}.mp4", frames)
            stats = {"config": {"_data": {"thresholds": 0.9}}, "records": [engine_record(random)]}
            (out / "stats").mkdir(exist_ok=True)
            (out / "stats" / f"{name}.json").write_text(json.dumps(stats))
            psnr = None if method == "dense" else 30.0 + i
            rows.append({
                "method": method, "prompt": prompt, "seed": 0, "attention_s": 3.0 - i, "total_s": 5.0 - i,
                "density": None if method == "dense" else 0.4, "refresh_rate": 0.5, "psnr": psnr, "ssim": None,
                "video": f"videos/{name}.mp4", "stats": f"stats/{name}.json", "parts_s": {"attention": 3.0 - i},
            })  # fmt: skip
    results = {"schema": "heart-results/1", "provenance": {"machine": "test"}, "rows": rows,
               "conventions": {"psnr": "mean over frames"}}  # fmt: skip
    (out / "results.json").write_text(json.dumps(results))
    return out


def engine_record(random) -> dict:
    shape = (2, 4, 3)  # layers, steps, heads
    return {"branch": "cond", "dense": [[True, False, False, False]] * 2, "density": random.random(shape).tolist(),
            "refreshed": (random.random(shape) > 0.5).astype(float).tolist()}  # fmt: skip


def test_page_is_self_contained_and_escaped(folder):
    text = report(folder).read_text()
    assert len(text) < 10_000_000
    assert not re.search(r"https?://(?!www\.w3\.org)", text)
    assert "<b>red</b>" not in text and "&lt;b&gt;red" in text
    for method in METHODS:
        assert method in text
    assert "attention 3.00× (3.00–3.00) and the model" in text


def test_the_script_finds_what_it_asks_for(folder):
    """What can be said of the script without a browser: every element that it works on is there, once."""
    text = report(folder).read_text()
    page, script = text.split("<script>")
    asked = set(re.findall(r'getElementById\("(\w+)"\)', script))
    assert asked >= {"play", "seek", "diff", "player", "case", "tip"}
    assert [name for name in asked if page.count(f'id="{name}"') != 1] == []
    cases = page.split('class="case"')[1:]
    assert len(cases) == 2
    for case in cases:  # each method's figure has a video; all but dense have a canvas for the difference
        assert case.count("<video") == len(METHODS) and case.count("<canvas") >= len(METHODS) - 1
    assert "layer 0, head 0" in page and page.count("data-tip=") > 20


def test_a_lost_video_is_one_sentence(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "r")
    next((tmp_path / "r" / "videos").glob("dense*.mp4")).unlink()
    with pytest.raises(HeartError, match="is gone"):
        report(tmp_path / "r")


@pytest.fixture(scope="module")
def browser():
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("needs chromium and chromedriver (Debian packages chromium, chromium-driver)")
    selenium = pytest.importorskip("selenium.webdriver")
    options = selenium.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
                 "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"):  # fmt: skip
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = selenium.Chrome(options, selenium.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


def wait_for(driver, script: str, seconds: float = 20.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := driver.execute_script(f"return {script}"):
            return value
        time.sleep(0.1)
    raise AssertionError(f"never true in the browser: {script}")


def test_in_a_browser(folder, browser):
    page = report(folder)
    for width in (1200, 390):
        browser.set_window_size(width, 900)
        browser.get(page.as_uri())
        wait_for(browser, "[...document.querySelectorAll('.case:not([hidden]) video')].every(v => v.currentTime > 0.1)")
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")  # no sideways scroll
    assert browser.get_log("browser") == []
    # pausing, the difference view, another prompt
    browser.find_element("id", "play").click()
    assert browser.execute_script("return document.querySelector('video').paused")
    browser.find_element("id", "diff").click()
    wait_for(
        browser,
        "document.querySelectorAll('canvas')[1].width > 1 && document.querySelectorAll('canvas')[1].offsetWidth > 0",
    )
    browser.execute_script("const c = document.getElementById('case'); c.value = 1; c.onchange()")
    assert browser.execute_script("return document.querySelectorAll('.case:not([hidden])').length") == 1


def test_hover_shows_the_value(folder, browser):
    from selenium.webdriver import ActionChains

    browser.set_window_size(1200, 900)
    browser.get(report(folder).as_uri())
    cell = browser.find_element("css selector", "details[open] rect.cell")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", cell)
    ActionChains(browser).move_to_element(cell).perform()
    assert "layer 0, head 0" in wait_for(browser, "document.getElementById('tip').textContent")


def test_the_headline_names_every_heart_the_closest_first():
    from heart_attention.evaluation.report.build import _headline

    entry = lambda name, speed, psnr: {  # noqa: E731
        "method": name, "attention_speedup": speed, "total_speedup": 1 + speed / 4, "psnr": psnr, "dense_share": 0.0,
        "attention_speedup_ci": [speed - 0.1, speed + 0.1], "total_speedup_ci": [1.2, 1.3],
    }  # fmt: skip
    rows = [
        entry("dense", 1, None),
        entry("svg2+heart", 2, 20.0),
        entry("xattention", 1.6, 23),
        entry("xattention+heart", 1.7, 27),
    ]
    line = _headline(rows)
    assert line.index("xattention+heart: attention 1.70× (1.60–1.80)") < line.index("svg2+heart: attention 2.00×")
    assert "27.0 dB" in line and "23.0 dB" not in line
    assert _headline(rows[:1]) == "Only dense attention was run."
    wholly_dense = [{**e, "dense_share": 1.0} for e in rows]
    assert "Every attention call ran dense" in _headline(wholly_dense)
    unsure = [{**e, "n": 1, "attention_speedup_ci": [e["attention_speedup"]] * 2} for e in rows]
    assert "too few steps to tell" in _headline(unsure) and "×" not in _headline(unsure)  # no headline without spread


def test_a_busy_machine_what_ran_dense_and_a_strip_are_shown(folder, tmp_path):
    from heart_attention.evaluation.video import strip

    out = tmp_path / "r"
    shutil.copytree(folder, out)
    whole = json.loads((out / "results.json").read_text())
    strip([("dense", np.zeros((4, 16, 16, 3), np.uint8))], out / "strips" / "a.png")
    for row in whole["rows"]:
        row |= {
            "spread": 0.7,
            "waited": 0.4,
            "strip": "strips/a.png",
            "dense_reasons": {"too few <tokens>": 5},
            "dense_share": 0.2,
        }
    (out / "results.json").write_text(json.dumps(whole))
    text = report(out).read_text()
    assert (
        "Times cannot be trusted" in text
        and "10 calls: too few &lt;tokens&gt;" in text
        and "data:image/png;base64" in text
    )
    assert "share of query–key pairs computed" in text  # what a column means stands on its heading


def test_names_and_what_was_run_are_told(folder, tmp_path):
    out = tmp_path / "r"
    shutil.copytree(folder, out)
    whole = json.loads((out / "results.json").read_text())
    whole["provenance"] |= {
        "model": "tiny",
        "call": {"width": 64, "height": 64, "num_inference_steps": 4},
        "heart": "1",
    }
    for row in whole["rows"]:
        row["dense_share"] = 1.0 if row["method"] == "xattention" else 0.0
    for path in (out / "stats").glob("xattention-*.json"):
        stats = json.loads(path.read_text())
        stats["records"][0]["dense"] = [[True] * 4] * 2
        path.write_text(json.dumps(stats))
    (out / "results.json").write_text(json.dumps(whole))
    text = report(out).read_text()
    assert "tiny, 64×64, 4 steps, 2 videos a method, version 1, test." in text
    assert "<dt>xattention+heart</dt><dd>mask reuse, and thresholds calibrated" in text
    assert "Not shown: xattention, which ran dense all the time." in text and ">xattention: attention" not in text
    assert "<summary><b>xattention</b>" not in text and "<summary><b>xattention+heart</b>" in text  # no maps of nothing
    assert 'class="videos square"' in text and 'class="videos"' in report(folder).read_text()
    assert "<small>3.00–3.00</small>" in text  # a speed-up with its interval


def test_the_old_name_warns(folder):
    with pytest.warns(DeprecationWarning, match="heart.report"):
        report.build(folder)


@pytest.mark.parametrize("content", ["[]", '{"records": [1]}', '{"records": [{"density": [[[1]]]}]}', "3"])
def test_odd_statistics_are_one_sentence(folder, tmp_path, content):
    out = tmp_path / "r"
    shutil.copytree(folder, out)
    for path in (out / "stats").glob("*.json"):
        path.write_text(content)
    with pytest.raises(HeartError, match="not a statistics file"):
        report(out)
