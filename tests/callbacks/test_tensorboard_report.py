"""One run with TensorBoard, stopped and resumed, read back from its files."""

from functools import partial

import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from federations import fit, make_client
from pfl_lightning.callbacks import ClassPictures
from pfl_lightning.methods import FedProx

pytest.importorskip("tensorboard", reason="pip install 'pfl-lightning[test]' for tensorboard")


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    from tensorboard.backend.event_processing import event_accumulator

    root = tmp_path_factory.mktemp("board")
    for rounds in (2, 4):
        settings = {"callbacks": [ClassPictures()], "max_rounds": rounds, "ckpt_path": "last"}
        # where the user names no version
        run = fit(make_client(partial(FedProx, mu=0.5)), root=root, logger=TensorBoardLogger(root, "board"), **settings)
    events = event_accumulator.EventAccumulator(
        str(run.folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0}
    )
    events.Reload()
    return run, events


def table(events, name: str) -> list[list[str]]:
    markdown = events.Tensors(f"{name}/text_summary")[-1].tensor_proto.string_val[0].decode()
    header, _, *rows = markdown.splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (header, *rows)]


@pytest.mark.exhaustive
def test_a_resumed_run_goes_on_in_its_folder(logged):
    run, events = logged
    assert [path.name for path in run.folder.parent.iterdir()] == ["version_0"]
    assert [point.step for point in events.Scalars("val/acc")] == [1, 2, 3, 4]
    assert [point.value for point in events.Scalars("val/acc")] == pytest.approx([row["val/acc"] for row in run.rows])


def test_pictures_are_shown(logged):
    run, events = logged
    drawn = {f"pictures/{path.stem}" for path in (run.folder / "pictures").glob("*.png")}
    assert drawn and set(events.Tags()["images"]) == drawn | {"partition"}
    assert all(events.Images(name)[-1].encoded_image_string.startswith(b"\x89PNG") for name in drawn | {"partition"})


def test_the_clients_are_a_table(logged):
    run, events = logged
    header, *rows = table(events, "clients")
    assert header == list(run.logger.clients[0])
    accuracy = header.index("test/acc")
    assert [float(row[accuracy]) for row in rows] == pytest.approx(
        [c["test/acc"] for c in run.logger.clients], rel=1e-5
    )


def test_the_summary_is_a_table_and_its_numbers_are_plotted(logged):
    run, events = logged
    shown = dict(table(events, "summary")[1:])
    assert shown["method"] == "FedProx" and shown["final/round"] == "4"
    final = run.logger.summary["final"]["test/acc"]
    for name in ("final/test/acc", "hp_metric"):
        last = events.Scalars(name)[-1]
        assert last.step == 4 and last.value == pytest.approx(final)


def test_hyper_parameters_are_beside_the_final_test_accuracy(logged):
    from tensorboard.plugins.hparams import plugin_data_pb2

    contents = logged[1].PluginTagToContent("hparams")
    data = {name: plugin_data_pb2.HParamsPluginData.FromString(content) for name, content in contents.items()}
    (metric,) = data["_hparams_/experiment"].experiment.metric_infos
    assert metric.name.tag == "hp_metric"
    settings = data["_hparams_/session_start_info"].session_start_info.hparams
    assert settings["mu"].number_value == 0.5
    assert settings["method"].string_value == "FedProx" and settings["data.batch_size"].number_value == 5
