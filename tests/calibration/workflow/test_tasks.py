"""Tasks name their records; a worker is a pure function of the task and leaves the model as it was."""

from __future__ import annotations

import functools
import pickle

import pytest
import torch
from models_for_tests import CALL, wan_pipe

from heart_attention.backbones import XAttention
from heart_attention.calibration.measure import trajectory
from heart_attention.calibration.workflow.settings import Settings
from heart_attention.calibration.workflow.tasks import CalibrationWorker, Task, set_up
from heart_attention.errors import HeartError

SETTINGS = Settings(XAttention(stride=4, block=8), ("a red ball",), CALL, candidates=(0.6, 0.9))


@pytest.fixture(scope="module")
def worker():
    made = set_up(functools.partial(wan_pipe, layers=2), SETTINGS.job())
    yield made
    made.close()
    assert not any("forward" in m.__dict__ for m in made.pipe.transformer.modules())


@pytest.fixture(scope="module")
def data(worker) -> bytes:
    ((name, files),) = worker.run(Task("trajectory", 0, text="a red ball", steps=(3, 5)), None)
    assert name == "trajectory_p000" and sorted(files) == [3, 5]
    return files[3]


def test_names_tell_tasks_apart():
    choice = ((0, 1), (1, 1))
    names = [
        Task("trajectory", 1, text="x", steps=(3,)).names(),
        Task("probe", 1, 3, wanted=((0, (0, 1)), (2, (1,)))).names(),
        Task("gradient", 1, 3, choice=choice).names(),
        Task("verify", 1, 3, choice=choice).names(),
        Task("verify", 1, 3, choice=((0, 0), (1, 1))).names(),
        Task("verify", 1, 4, choice=choice).names(),
    ]
    flat = [name for group in names for name in group]
    assert len(set(flat)) == len(flat) == 7 and names[1] == ["probe_p001_s003_l000", "probe_p001_s003_l002"]


def test_tasks_are_picklable_and_say_what_data_they_need():
    task = Task("verify", 1, 3, choice=((0,),))
    assert pickle.loads(pickle.dumps(task)) == task and task.data_key == (1, 3)
    assert Task("trajectory", 1, text="x").data_key is None


def test_what_is_left_of_a_task_when_records_are_there():
    task = Task("probe", 0, 3, wanted=((0, (0,)), (1, (1,)), (2, (0,))), null=True)
    left = task.without({"probe_p000_s003_l001"})
    assert left.wanted == ((0, (0,)), (2, (0,))) and left.null
    later = task.without({"probe_p000_s003_l000"})
    assert later.wanted == ((1, (1,)), (2, (0,))) and not later.null  # the floor is on record


def test_a_task_gives_the_same_record_again(worker, data):
    task = Task("verify", 0, 3, choice=((0, 1), (1, 0)))
    (first,), (second,) = list(worker.run(task, data)), list(worker.run(task, data))
    assert first == second and first[0] == task.names()[0] and first[1]["error"] > 0


def test_records_of_a_probe_come_layer_by_layer(worker, data):
    task = Task("probe", 0, 3, wanted=((0, (0,)), (1, (0, 1))), null=True)
    records = worker.run(task, data)
    name, record = next(records)
    assert name == "probe_p000_s003_l000" and list(record["heads"]) == ["0"] and "null" in record
    assert [n for n, _ in records] == ["probe_p000_s003_l001"]


def test_the_start_noise_belongs_to_the_prompt(worker, data):
    ((_, files),) = worker.run(Task("trajectory", 0, text="a red ball", steps=(3,)), None)
    assert files[3] == data
    ((_, other),) = worker.run(Task("trajectory", 1, text="a red ball", steps=(3,)), None)
    one, two = (trajectory.from_bytes(d).branches[0].inputs["hidden_states"] for d in (data, other[3]))
    assert not torch.equal(one, two)


def test_unknown_tasks_and_missing_steps_are_one_sentence(worker, data):
    with pytest.raises(HeartError, match="no calibration task of kind 'dance'"):
        list(worker.run(Task("dance", 0, 3), data))
    with pytest.raises(HeartError, match="took 8 steps but step 9"):
        list(worker.run(Task("trajectory", 0, text="x", steps=(9,)), None))


def test_a_worker_needs_one_of_two_transformers():
    pipe = wan_pipe(layers=2)

    class Both:
        transformer, transformer_2, scheduler = pipe.transformer, pipe.transformer, pipe.scheduler

    with pytest.raises(HeartError, match="two transformers"):
        CalibrationWorker(Both(), SETTINGS.job())
