"""The client and the server together: training, sampling, data, and how a script survives a crash of the server."""

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from tests.support.servers.running import Server, mock_config, torch_config
from tests.support.texts import counting_rollout
from twinkle.template import Template
from twinkle_client import (
    InvalidRequestError,
    LoraConfig,
    NotFoundError,
    SessionLostError,
    TwinkleClient,
    hub,
)
from twinkle_client.client import current
from twinkle_client.client.json_body import encode
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset, DatasetMeta
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.preprocessor import AlpacaProcessor
from twinkle_client.reward import GSM8KAccuracyReward
from twinkle_client.rollout import ClientMultiTurnRollout
from twinkle_client.sampler import Sampler

TINY = "random://llama-tiny"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("tiny"), torch_config(TINY)).start()
    yield server
    server.close()


@pytest.fixture
def tiny(server):
    with TwinkleClient(server.url, "a-token", seed=1) as client:
        yield client


def feature(*tokens):
    ids = np.array(tokens)
    return {"input_ids": ids, "labels": np.append(ids[1:], -100)}


def adapter(client, name="default", **options):
    model = MultiLoraTransformersModel(TINY, client=client)
    model.add_adapter_to_model(name, LoraConfig(r=4), **options)
    model.set_optimizer("AdamW", lr=1e-2)
    return model


def test_training_saving_resuming_and_sampling(tiny):
    model = adapter(tiny)
    rows = [feature(1, 2, 3, 4, 5), feature(7, 8, 9)]
    losses = []
    for _ in range(4):
        outputs = model.forward_backward(inputs=rows)
        assert [len(row) for row in outputs["logps"]] == [5, 3]
        assert model.clip_grad_and_step(max_grad_norm=1.0) > 0
        losses.append(float(model.calculate_metric(is_training=True)["loss"]))
    assert losses[-1] < losses[0] - 0.1
    saved = model.save("step 4", save_optimizer=True, consumed_train_samples=8)
    assert saved == f"twinkle://{tiny.session_id}-default/weights/step_4"
    expected = model.forward_only(inputs=rows)["logps"]

    fresh = adapter(tiny, "fresh")
    progress = fresh.resume_from_checkpoint(saved)
    assert (progress["cur_step"], progress["consumed_train_samples"]) == (4, 8)
    np.testing.assert_allclose(np.concatenate(fresh.forward_only(inputs=rows)["logps"]), np.concatenate(expected))
    (run,) = [run for run in tiny.list_training_runs() if run.training_run_id == f"{tiny.session_id}-default"]
    assert run.lora_rank == 4
    assert tiny.list_checkpoints(run.training_run_id)[-1].twinkle_path == saved
    assert tiny.get_weights_info(saved).base_model == run.base_model

    sampler = Sampler(model)
    params = {"max_tokens": 4, "temperature": 0.0, "logprobs": 1}
    (named,) = sampler.sample([feature(1, 2)], params, adapter_name="default")
    (stored,) = sampler.sample([feature(1, 2)], params, adapter_uri=saved)
    assert named.sequences[0].tokens == stored.sequences[0].tokens
    assert len(named.sequences[0].logprobs) == len(named.sequences[0].tokens)
    assert named.sequences[0].new_input_feature["input_ids"][:2] == [1, 2]


def test_before_there_is_an_adapter_the_base_model_answers(tiny):
    model = MultiLoraTransformersModel(TINY, client=tiny)
    rows = [feature(1, 2, 3, 4, 5), feature(7, 8, 9)]
    alone = model.forward_only(inputs=rows)
    talk = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
    spoken = model.forward_only(inputs=talk)["logps"]
    model.add_adapter_to_model("default", LoraConfig(r=4))
    assert alone == model.forward_only(inputs=rows, disable_lora=True)
    assert spoken == model.forward_only(inputs=talk, disable_lora=True)["logps"]
    model.remove_adapter("default")
    assert alone == model.forward_only(inputs=rows)
    with pytest.raises(InvalidRequestError, match="not used before"):
        model.add_adapter_to_model("default", LoraConfig(r=4))


def test_a_conversation_with_an_environment(tiny):
    sampler = Sampler(TINY, client=tiny)
    sampler.set_template("Template")
    template = counting_rollout.calls_every_turn(Template(TINY))
    tool, tools = counting_rollout.environment_tool()
    params = counting_rollout.until_an_even_token()
    (done,) = ClientMultiTurnRollout(sampler, template, tools, params, max_turns=3)([counting_rollout.QUESTION])
    counting_rollout.check(done, tool)
    (logps,) = MultiLoraTransformersModel(TINY, client=tiny).forward_only(inputs=[done])["logps"]
    trained = [value for value, label in zip(logps, done["labels"], strict=True) if label != -100]
    np.testing.assert_allclose(trained, [pairs[0][1] for pairs in done["logprobs"]], atol=1e-5)


def test_preferences(tiny):
    model = adapter(tiny)
    model.set_loss("DPOLoss", beta=0.1)
    model.add_metric("DPOMetric", beta=0.1)
    pair = [feature(1, 2, 3), feature(1, 4, 5)]
    margins = []
    for _ in range(3):
        reference = model.forward_only(inputs=pair, disable_lora=True)
        model.forward_backward(inputs=pair, ref_outputs=reference)
        model.clip_grad_and_step()
        margins.append(float(model.calculate_metric(is_training=True)["rewards/margins"]))
    assert margins[0] == pytest.approx(0, abs=1e-4)
    assert margins[-1] > margins[0]


def test_seeds_make_the_same_adapter(server):
    losses = []
    for seed in (1, 1, 2):
        with TwinkleClient(server.url, "a-token", seed=seed) as client:
            model = adapter(client)
            model.forward_backward(inputs=[feature(1, 2, 3)])
            model.clip_grad_and_step()
            losses.append(model.forward_only(inputs=[feature(1, 2, 3)])["logps"][0][0])
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.slow
def test_data_on_the_server(tiny, tmp_path):
    lines = [f'{{"instruction": "say {n}", "output": "{n}"}}' for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    dataset = Dataset(DatasetMeta(str(tmp_path / "rows.jsonl"), data_slice=range(5)), client=tiny)
    dataset.set_template("Template", model_id=TINY, max_length=128)
    dataset.map(AlpacaProcessor(client=tiny))
    dataset.encode()
    assert len(dataset) == 5
    assert dataset[0]["messages"][0]["content"] == "say 0"
    loader = DataLoader(dataset, batch_size=2, shuffle=True)
    model = adapter(tiny)
    seen = []
    for _ in range(2):
        for batch in loader:
            model.forward_backward(inputs=batch)
            seen.append([row["output"] for row in batch])
    assert [len(batch) for batch in seen] == [2, 2, 1] * 2
    assert sorted(text for batch in seen[:3] for text in batch) == [str(n) for n in range(5)]
    assert seen[:3] != seen[3:]
    loader.set_processor("InputProcessor", padding_side="left")
    shapes = [(len(batch["input_ids"]), len(batch["labels"])) for batch in loader]
    assert shapes == [(2, 2), (2, 2), (1, 1)]  # collated: one column of all rows, no reference to them
    reward = GSM8KAccuracyReward(client=tiny)
    row = {"messages": [{"role": "assistant", "content": r"\boxed{18}"}], "user_data": [["ground_truth", "18"]]}
    assert reward([row]) == [1.0]
    assert Sampler(model).template.decode(dataset[0]["input_ids"]).count("say 0") == 1
    beat = tiny.post("/processor/twinkle/heartbeat", encode({"processor_id": dataset.processor_id}))
    assert beat == {"status": "ok"}
    with pytest.raises(NotFoundError, match="no such processor in this session"):
        tiny.post("/processor/twinkle/heartbeat", encode({"processor_id": "pid:other"}))


def test_files_of_a_server_on_this_machine(tiny, monkeypatch):
    monkeypatch.setattr(current, "_default", tiny)
    found = hub.resolve("llama-tiny")  # the server's name of it; the library would not know it
    assert (found.path / "tokenizer.json").is_file()
    assert hub.load_tokenizer(TINY).vocab_size > 0


def test_mistakes_are_said_in_the_servers_words(tiny):
    with pytest.raises(NotFoundError, match="nothing"):
        MultiLoraTransformersModel("nothing", client=tiny)
    model = adapter(tiny)
    with pytest.raises(InvalidRequestError, match=r"SomeLoss.*CrossEntropyLoss"):
        model.set_loss("SomeLoss")
    with pytest.raises(InvalidRequestError, match="no_such_argument"):
        model.forward_backward(inputs=[feature(1, 2)], no_such_argument=1)
    with pytest.raises(NotFoundError):
        tiny.list_checkpoints("session_x-default")
    model.forward_backward(inputs=[feature(1, 2)])  # training continues
    model.clip_grad_and_step()


def test_the_tinker_protocol_takes_any_key_of_init_tinker_client(server):
    """The key is accepted because of the header that the client sends with it."""
    url, key = f"{server.url}/api/v1/get_server_capabilities", {"X-API-Key": "EMPTY_TOKEN"}
    assert httpx.get(url, headers=key, trust_env=False).status_code == 401
    ours = {**key, "Twinkle-Authorization": "Bearer EMPTY_TOKEN"}
    assert httpx.get(url, headers=ours, trust_env=False).status_code == 200


def test_a_session_that_was_finished_elsewhere(server, tiny):
    model = adapter(tiny)
    headers = {"Authorization": "Bearer a-token"}
    body = {"session_id": tiny.session_id}
    httpx.post(f"{server.url}/api/v1/twinkle/finish_session", json=body, headers=headers, trust_env=False)
    with pytest.raises(SessionLostError, match="finished"):
        model.step()
    assert tiny.list_checkpoints(f"{tiny.session_id}-default")  # the eviction saved the unsaved state


# --- a server that dies -----------------------------------------------------------------------------------------------


def train(server, crash):
    """Train four steps and return the log-probabilities. ``crash`` is called with the number of each step."""
    with TwinkleClient(server.url, "a-token", 0.2, seed=3) as client:
        model = MultiLoraTransformersModel("mock", client=client)
        model.add_adapter_to_model("default", LoraConfig(r=4))
        model.set_optimizer("AdamW", lr=1e-2)
        for step in range(4):
            crash(step)
            model.forward_backward(inputs=[feature(step + 1, 2, 3, 4)])
            model.clip_grad_and_step()
        return model.forward_only(inputs=[feature(1, 2, 3, 4)])["logps"]


@pytest.mark.slow
def test_a_script_does_not_notice_that_the_server_was_killed(tmp_path):
    server = Server(tmp_path, mock_config()).start()
    reached, killed = threading.Event(), threading.Event()

    def wait_for_the_end(step):
        if step == 2:
            reached.set()
            assert killed.wait(60)

    try:
        undisturbed = train(server, lambda step: None)
        # A server ends when the thread that started it ends, so the script runs in another thread.
        with ThreadPoolExecutor(1) as pool:
            script = pool.submit(train, server, wait_for_the_end)
            assert reached.wait(60)
            server.kill()
            killed.set()
            server.start()
            disturbed = script.result(120)
    finally:
        server.close()
    assert disturbed == undisturbed
