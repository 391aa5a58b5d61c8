"""The dashboard in a real browser, view by view, as a user who clicks through it (make test-dashboard)."""

import base64
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.support.servers.chromium import Page
from tests.support.servers.running import Server, Tenant, datum, mock_config
from tests.support.servers.serving import SdkServer
from twinkle.server.cli import command_line as cli

pytestmark = pytest.mark.browser

EVIL = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    page = Page(tmp_path_factory.mktemp("downloads"))
    yield page
    page.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("browsed"), sample=0.3).start()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def _no_complaints(page: Page) -> Iterator[None]:
    """Fails the test if a script failed or the page's policy blocked anything."""
    yield
    assert page.complaints() == []


class Trainer:
    """A client that trains a step now and then in the background and logs a reward."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.model = tenant.model()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._train)

    def __enter__(self) -> "Trainer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _train(self) -> None:
        seq = 1
        while not self._stop.wait(0.2):
            self.tenant.result(self.tenant.forward_backward(self.model, seq, [datum([1, 2, 3, 4])]))
            self.tenant.json(self.tenant.optim_step(self.model, seq + 1))
            reward = {"values": {"reward": 1 - 1 / seq}}
            assert self.tenant.post(f"twinkle/training_runs/{self.model}/metrics", reward).status_code == 200
            seq += 2


def points_of(page: Page, name: str) -> int:
    return int(page.find(f'.chart[data-name="{name}"]').get_attribute("data-points") or 0)


def test_a_wrong_key_and_a_right_one(page: Page, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = Server(tmp_path, mock_config(auth={"mode": "keys"})).start()
    try:
        page.open(server.url)
        page.enter_key("tml-wrong")
        assert "a key of this server" in page.text("#problem")
        assert page.script("return sessionStorage.length") == 0
        assert not page.find("#views").is_displayed()
        assert all("401" in complaint for complaint in page.complaints())
        capsys.readouterr()
        assert cli.main(["keys", "create", "--name", "alice", "-c", str(server.directory / "config.yaml")]) == 0
        page.enter_key(capsys.readouterr().out.strip())
        assert page.text("#runs") == "No runs yet of tenant alice."
        page.until(lambda: page.text("#who") == "alice · key alice")
        assert not page.find("#problem").is_displayed()
        page.click("#forget-key")
        assert page.find("#key-form").is_displayed()
        assert not page.find("#who").is_displayed()
        assert page.script("return sessionStorage.length + localStorage.length") == 0
        assert page.script("return document.cookie") == ""
    finally:
        server.close()


def test_an_open_server_says_that_each_key_is_a_tenant(page: Page, server: Server) -> None:
    Tenant(server.url, "tml-typed").model(user_metadata={"name": EVIL})
    page.open(server.url)
    page.enter_key("tml-mistyped")
    told = page.until(lambda: page.text("#runs"))
    assert "accepts any key, and each key is a tenant of its own." in told
    assert "Other keys have 1 run here" in told
    page.until(lambda: page.text("#who").endswith(" · open server"))
    page.click("#forget-key")
    page.enter_key("tml-typed")
    page.until(lambda: EVIL in page.text("#runs"))
    page.click("#forget-key")


def test_curves_grow_while_a_client_trains(page: Page, server: Server) -> None:
    tenant = Tenant(server.url, "tml-curves")
    with Trainer(tenant) as trainer:
        page.open(server.url)
        page.enter_key(tenant.key)
        page.until(lambda: trainer.model in page.text("#runs"))
        page.click("#runs a")
        assert page.text("#run-detail h2") == trainer.model
        seen = page.until(lambda: points_of(page, "loss"))
        page.until(lambda: points_of(page, "loss") >= seen + 3)
        page.until(lambda: points_of(page, "reward") >= 3)
    names = [chart.get_attribute("data-name") for chart in page.all(".chart")]
    assert names == ["loss", "reward", "learning_rate", "grad_norm", "tokens"]
    assert "logged by the client" in page.text('.chart[data-name="reward"]')
    assert "at step" in page.text('.chart[data-name="loss"] output')
    drawn = page.find('.chart[data-name="loss"] polyline').get_attribute("points") or ""
    assert len(drawn.split()) == points_of(page, "loss")


def test_nobody_is_asked_while_nobody_looks(page: Page, server: Server) -> None:
    tenant = Tenant(server.url, "tml-hidden")
    tenant.model()
    page.open(server.url)
    page.enter_key(tenant.key)
    page.find("#runs a")
    asked = "return performance.getEntriesByType('resource').filter(e => e.name.includes('/adapters')).length"
    hide = (
        "Object.defineProperty(document, 'hidden', {value: arguments[0], configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    before = page.script(asked)
    page.until(lambda: page.script(asked) != before)
    page.driver.execute_script(hide, True)
    time.sleep(2.5)  # running requests are answered by now
    before = page.script(asked)
    time.sleep(4.5)
    assert page.script(asked) == before
    page.driver.execute_script(hide, False)
    page.until(lambda: page.script(asked) != before)


def test_a_model_that_is_away_leaves_dashes(page: Page, server: Server) -> None:
    """On Ray a model's queue may be listed without its numbers, or nothing may be known about it."""
    away = """
        const asked = window.fetch, numbers = arguments[0];
        window.fetch = async (url, ...more) => {
          const response = await asked(url, ...more);
          if (!String(url).endsWith("/api/v1/status")) return response;
          return new Response(JSON.stringify({ ...(await response.json()), models: numbers }));
        };
    """
    tenant = Tenant(server.url, "tml-away")
    model = tenant.model()
    for numbers in ({}, {"mock": {}}):
        page.open(server.url)
        page.driver.execute_script(away, numbers)
        page.enter_key(tenant.key)
        page.view("Adapters")
        page.until(lambda: model in page.text("#adapters"))
        assert page.until(lambda: page.text("#queue .tiles")).count("–") == 7
        assert not page.find("#problem").is_displayed()


def test_adapters_and_the_queue(page: Page, server: Server) -> None:
    tenant = Tenant(server.url, "any key will do")  # a key of any form, as the native client sends them
    native = tenant.http
    native.headers["Twinkle-Authorization"] = "Bearer any key will do"
    session = tenant.session()
    live, parked = tenant.model(session), tenant.model()
    tenant.forward_backward(live, 2)  # waits for number 1
    finish = {"reason": {"type": "success"}, "detail": None}
    assert tenant.post(f"sessions/{parked.split(':')[0]}/finish", finish).status_code == 200
    page.open(server.url)
    page.enter_key("any key will do")
    page.view("Adapters")
    rows = {row.text.split()[0]: row.text for row in page.until(lambda: page.all("#adapters tbody tr"))}
    assert "device" in rows[live]
    assert "parked" in rows[parked]
    assert "create_training_client_from_state_with_optimizer" in rows[parked]
    tiles = page.text("#queue")
    assert "merge ratio" in tiles
    assert "your waiting ops\n1" in tiles
    tenant.result(tenant.forward_backward(live, 1))
    page.until(lambda: "your waiting ops\n0" in page.text("#queue"))


def test_sessions(page: Page, server: Server) -> None:
    tenant = Tenant(server.url, "tml-sessions")
    body = {"tags": ["one", "two"], "sdk_version": "0.36.0", "display_name": "my experiment"}
    session = tenant.post("create_session", body).json()["session_id"]
    tenant.model(session)
    page.open(server.url)
    page.enter_key(tenant.key)
    page.view("Sessions")
    row = page.text("#sessions tbody tr")
    for text in (session, "my experiment", "active", "0.36.0", "one, two"):
        assert text in row


def test_checkpoints_are_downloaded_and_deleted(page: Page, server: Server, tmp_path: Path) -> None:
    tenant = Tenant(server.url, "tml-checkpoints")
    model = tenant.model()
    path = tenant.json(tenant.save(model, 1, "first"))["path"]
    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    page.open(server.url, "#checkpoints")
    page.enter_key(tenant.key)
    assert page.text("#checkpoints code") == path

    page.click("#checkpoints button:not(.danger)")
    file = page.until(lambda: next(tmp_path.glob("*.tar")))
    assert file.name == f"{model.replace(':', '-')}-weights-first.tar"
    with tarfile.open(file) as tar:
        assert {Path(name).name for name in tar.getnames()} == {"adapter.npz", "state.json"}

    page.click("#checkpoints .danger")
    assert path in page.text("dialog")
    page.click("dialog button:not(.danger)")
    assert not page.all("dialog")
    assert tenant.get("checkpoints").json()["cursor"]["total_count"] == 1
    page.click("#checkpoints .danger")
    page.click("dialog .danger")
    page.until(lambda: page.text("#checkpoints") == "No checkpoints yet.")
    assert tenant.get("checkpoints").json()["cursor"]["total_count"] == 0


def test_a_chat_with_a_checkpoint_beside_the_base_model(page: Page, server: Server) -> None:
    tenant = Tenant(server.url, "tml-playground")
    model = tenant.model()
    tenant.result(tenant.forward_backward(model, 1))
    tenant.json(tenant.optim_step(model, 2))
    path = tenant.json(tenant.save(model, 3, "tuned"))["path"]
    page.open(server.url, "#checkpoints")
    page.enter_key(tenant.key)
    page.click("#checkpoints .actions a")  # "Chat" chooses this checkpoint
    page.until(lambda: path in page.text("#tuned h3"))
    page.until(lambda: "mock" in page.text("#base h3"))
    options = [option.text for option in page.all("#model option")]
    assert options == [path, f"{model} (current weights)"]

    page.find("#prompt").send_keys("hello")
    page.script("document.getElementById('max-tokens').value = '3'")
    page.until(lambda: _answered(page))

    page.script("document.getElementById('max-tokens').value = '4000'")
    page.until(lambda: _stopped_halfway(page))
    page.until(lambda: tenant.get("status").json()["models"]["mock"]["waiting_samples"] == 0)
    assert page.find("#send").is_enabled()


def _answered(page: Page) -> bool:
    """Send a message and return whether both columns answered; the mock may end an answer with its first token."""
    page.click("#clear")
    page.click("#send")
    for column in ("#base", "#tuned"):
        page.find(f"{column} .assistant.done")
        assert page.text(f"{column} .user") == "hello"
    page.until(lambda: page.find("#send").is_enabled())
    return all(each.text for each in page.all(".assistant.done"))


def _stopped_halfway(page: Page) -> bool:
    """Send and stop; return False if the mock was faster, since it may end an answer at any token."""
    page.click("#clear")
    page.click("#send")
    page.until(lambda: all(each.text or "done" in str(each.get_attribute("class")) for each in page.all(".assistant")))
    if not page.find("#stop").is_enabled():
        return False
    page.click("#stop")
    page.until(lambda: page.find("#send").is_enabled())
    assert not page.all(".assistant.failed")
    return len(page.all(".assistant.stopped")) == 2


# Gives the page a file, as a user who drops it on the form or pastes it into the prompt.
GIVE = """
    const [how, base64, type] = arguments;
    const bytes = Uint8Array.from(atob(base64), (each) => each.charCodeAt(0));
    const given = new DataTransfer();
    given.items.add(new File([bytes], "given", { type }));
    const place = document.getElementById(how === "drop" ? "chat" : "prompt");
    const about = { dataTransfer: given, clipboardData: given, bubbles: true, cancelable: true };
    place.dispatchEvent(how === "drop" ? new DragEvent(how, about) : new ClipboardEvent(how, about));
"""
# Keeps the contents of the user's messages that the page sends.
KEEP_SENT = """
    const asked = window.fetch;
    window.sent = [];
    window.fetch = (url, options = {}) => {
      const messages = JSON.parse(options.body ?? "{}").messages ?? [];
      window.sent.push(...messages.slice(-1).map((each) => each.content));
      return asked(url, options);
    };
"""


def _picture(path: Path, colour: str, form: str = "PNG") -> str:
    """Write a picture, and return its data URI."""
    Image.new("RGB", (96, 64), colour).save(path, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _give(page: Page, how: str, uri: str) -> None:
    kind, _, data = uri.removeprefix("data:").partition(";base64,")
    page.driver.execute_script(GIVE, how, data, kind)


def _sources(page: Page, selector: str) -> list[str | None]:
    return [each.get_attribute("src") for each in page.all(f"{selector} img")]


def test_pictures_by_file_drop_and_paste(page: Page, server: Server, tmp_path: Path) -> None:
    """The mock reads text only, so it refuses them; the conversation goes on without them."""
    red, green, blue = (
        _picture(tmp_path / f"{colour}.{form.lower()}", colour, form)
        for colour, form in (("red", "PNG"), ("green", "JPEG"), ("blue", "PNG"))
    )
    page.open(server.url, "#playground")
    page.enter_key("tml-pictures")
    page.until(lambda: "mock" in page.text("#base h3"))
    page.find("#picture").send_keys(str(tmp_path / "red.png"))
    page.until(lambda: _sources(page, "#pictures") == [red])
    _give(page, "drop", green)
    page.until(lambda: _sources(page, "#pictures") == [red, green])
    _give(page, "paste", blue)
    page.until(lambda: _sources(page, "#pictures") == [red, green, blue])
    page.click("#pictures span:nth-child(2) button")
    page.until(lambda: _sources(page, "#pictures") == [red, blue])
    _give(page, "drop", "data:image/webp;base64,UklGRg==")
    page.until(lambda: "given is image/webp; pictures are PNG or JPEG" in page.text("#picture-hint.problem"))
    assert _sources(page, "#pictures") == [red, blue]

    page.find("#prompt").send_keys("what is this?")
    page.click("#send")
    page.until(lambda: "image" in page.text("#base .assistant.failed"))
    assert _sources(page, "#base .user") == [red, blue]
    assert not page.all("#pictures img, #picture-hint.problem")
    (complaint,) = page.complaints()
    assert "status of 400" in complaint
    page.until(lambda: page.find("#send").is_enabled())
    page.click("#send")
    page.find("#base .assistant.done")


def test_a_chat_about_a_picture(page: Page, tmp_path: Path) -> None:
    server = SdkServer(tmp_path, model="random://qwen3-vl-tiny").start()
    try:
        red = _picture(tmp_path / "red.png", "red")
        page.open(server.url, "#playground")
        page.driver.execute_script(KEEP_SENT)
        page.enter_key("tml-seeing")
        page.until(lambda: "qwen3-vl-tiny" in page.text("#base h3"))
        page.script("document.getElementById('max-tokens').value = '4'")
        page.find("#picture").send_keys(str(tmp_path / "red.png"))
        page.until(lambda: _sources(page, "#pictures") == [red])
        page.find("#prompt").send_keys("Which colour?")
        page.click("#send")
        page.until(lambda: len(page.all("#base .assistant.done")) == 1)
        page.until(lambda: page.find("#send").is_enabled())
        page.click("#send")  # the conversation has the picture, and the model reads it again
        page.until(lambda: len(page.all("#base .assistant.done")) == 2)
        assert _sources(page, "#base .user") == [red]
        picture = {"type": "image_url", "image_url": {"url": red}}
        first, second = page.script("return window.sent")
        assert (first, second) == ([picture, {"type": "text", "text": "Which colour?"}], "Which colour?")
    finally:
        server.close()


def test_answers_that_are_queued(page: Page, tmp_path: Path) -> None:
    """A training pass keeps the mock busy for longer than the test, so that no answer begins."""
    server = Server(tmp_path, **{"pass": 120.0, "quiet": 0.1}).start()
    try:
        tenant = Tenant(server.url, "tml-queued")
        tenant.forward_backward(tenant.model(), 1)
        page.open(server.url, "#playground")
        page.enter_key(tenant.key)
        page.until(lambda: "mock" in page.text("#base h3"))
        page.find("#prompt").send_keys("hello")
        page.click("#send")
        page.until(lambda: "queued for" in page.text("#base .assistant"))
        page.view("Adapters")
        queued = page.until(lambda: page.text("#queue") if "1 / 0" in page.text("#queue") else None)
        assert "your samples: queued / running\n1 / 0" in queued
        assert "oldest queued sample" in queued
    finally:
        server.close()


def test_what_tenants_write_is_never_markup(page: Page, server: Server) -> None:
    tenant = Tenant(server.url, "tml-evil")
    session = tenant.post("create_session", {"tags": [EVIL], "display_name": EVIL, "sdk_version": EVIL}).json()
    lora = {"rank": 8, "seed": 1}
    body = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": "mock", "lora_config": lora}
    created = tenant.submit("create_model", {**body, "user_metadata": {EVIL: EVIL}, "type": "create_model"})
    model = tenant.json(created)["model_id"]
    name = EVIL[:64]
    tenant.post(f"twinkle/training_runs/{model}/metrics", {"values": {name: 1.0, "__proto__": 2.0}})
    for number in range(2):
        tenant.post(f"twinkle/training_runs/{model}/metrics", {"step": 9 - number, "values": {name: 1e300 * number}})
    page.open(server.url)
    page.enter_key(tenant.key)
    page.click("#runs a")
    page.until(lambda: len(page.all(".chart")) == 2)
    assert EVIL in page.text("#run-detail dl")
    assert name in page.text(".charts")
    page.view("Sessions")
    assert EVIL in page.text("#sessions")
    page.driver.get(f"{server.url}/dashboard#runs/{EVIL}%22%3E")
    page.driver.refresh()
    assert "unknown" in page.text("#problem")
    page.complaints()  # clears the message about the 404
    assert page.script("return window.hacked === undefined")
    assert not page.all("main img, main script")


def test_a_server_that_goes_away_and_comes_back(page: Page, tmp_path: Path) -> None:
    server = Server(tmp_path).start()
    try:
        tenant = Tenant(server.url, "tml-away")
        tenant.model()
        page.open(server.url)
        page.enter_key(tenant.key)
        page.find("#runs a")
        server.kill()
        page.until(lambda: "cannot be reached" in page.text("#problem"))
        server.start()
        page.until(lambda: not page.find("#problem").is_displayed())
        page.complaints()  # clears messages about requests without an answer
    finally:
        server.close()
