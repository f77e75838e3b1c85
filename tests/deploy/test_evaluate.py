"""Accuracy of every form of a file, and data that does not fit."""

import copy
import io
import os
import shutil
import tarfile

import pytest
import torch
from PIL import Image

from tests.fixtures.colours import COLOURS, write_images
from wbmm.data.images import match_classes, open_labelled
from wbmm.deploy.evaluate import collect, quality, top
from wbmm.deploy.runtime import open_runner

FORMS = ("training", "compact", "dense", "onnx", "openvino")


@torch.no_grad()
def expected_logits(trained, folder):
    paths = sorted(folder.glob("*/*.png"))
    inputs = torch.stack([trained.card.transform()(Image.open(path)) for path in paths])
    labels = torch.tensor([list(COLOURS).index(path.parent.name) for path in paths])
    return trained(inputs), labels


def test_every_form_gives_the_model_s_own_answers(trained, files, card, images):
    expected, labels = expected_logits(trained, images / "val")
    accuracy = 100 * (expected.argmax(1) == labels).double().mean().item()
    source = open_labelled(card, images)
    reference = None
    for form in FORMS:
        outputs = collect(open_runner(files[form]), source, batch=5)
        reference = reference or outputs
        assert outputs.labels.tolist() == labels.tolist()
        torch.testing.assert_close(outputs.logits, expected, rtol=0, atol=1e-4)
        assert top(outputs, 1) == pytest.approx(accuracy)
        assert top(outputs, 5) == 100
        assert quality(outputs.logits, reference.logits).agreement == 100
    assert accuracy > 60  # it has learned something, so that agreement means something


def test_one_table_for_several_files(files, images, command, capsys):
    chosen = [files["training"], files["compact"], files["onnx"]]
    assert command("eval", *chosen, "--data", images, "--workers", 0) == 0
    text = capsys.readouterr().out
    assert "transform: RGB, shorter side to 32 px (bicubic), centre 32x32" in text
    rows = [line.split() for line in text.splitlines() if line.startswith(("training", "compact", "onnx"))]
    assert len(rows) == 3
    assert all(row.count("32") == 1 for row in rows)
    assert [row[-2] for row in rows[1:]] == ["100.00", "100.00"]
    assert all(float(row[-1]) < 1e-4 for row in rows[1:])


def test_the_folder_may_hold_splits_or_classes(card, images):
    whole, part = open_labelled(card, images), open_labelled(card, images / "val")
    assert [whole.name(i) for i in range(len(whole))] == [part.name(i) for i in range(len(part))]
    assert len(open_labelled(card, images, split="train")) == 64


@pytest.mark.parametrize("form", ["compact", "onnx", "openvino"])
def test_workers_read_the_same(files, card, images, form):
    source, runner = open_labelled(card, images), open_runner(files[form])
    torch.testing.assert_close(collect(runner, source, 8, workers=2).logits, collect(runner, source, 8).logits)


def test_limit_takes_equally_many_of_each_class(files, images, command, capsys):
    assert command("eval", files["compact"], "--data", images, "--limit", 8, "--workers", 0) == 0
    assert "  8  " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("black", "green", "blue", "red"), None),  # folders are sorted, so the order on disk does not matter
        (("black", "blue", "green", "yellow"), "number 3 is 'yellow' in the data and 'red' in the model"),
        (("black", "blue", "green"), "the data has 3 classes, the model 4"),
    ],
)
def test_other_classes_are_an_error(tmp_path, card, names, message):
    source = open_labelled(card, write_images(tmp_path / "val", 1, 0, names))
    if message is None:
        match_classes(card, source)
        return
    with pytest.raises(ValueError, match=message):
        match_classes(card, source)


def test_the_same_classes_in_another_order_are_an_error(card, images):
    source = open_labelled(card, images)
    with pytest.raises(ValueError, match="in another order: number 0 is 'black' in the data and 'red' in the model"):
        match_classes(card.replace(class_names=list(reversed(COLOURS))), source)


def test_more_classes_than_the_model_has_are_an_error(files, command, capsys):
    assert command("eval", files["compact"], "--source", "digits") == 1
    assert "the data has 10 classes, the model 4" in capsys.readouterr().err


def test_a_bad_image_is_named_and_may_be_skipped(files, images, tmp_path, command, capsys):
    shutil.copytree(images / "val", tmp_path / "val")
    bad = tmp_path / "val" / "green" / "0.png"
    bad.write_bytes(bad.read_bytes()[:200])
    arguments = ("eval", files["compact"], "--data", tmp_path, "--workers", 0)
    assert command(*arguments) == 1
    error = capsys.readouterr().err
    assert str(bad) in error
    assert "--skip-bad" in error
    assert error.count("\n") == 1
    assert command(*arguments, "--skip-bad") == 0
    assert "31 (1 skipped)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--data", "nowhere"], "there is no such folder"),
        ([], "labelled pictures from a folder: --data DIR"),
        (["--data", "EMPTY"], "has no class folders"),
        (["--data", "IMAGES", "--split", "exam"], "no folder 'exam'"),
        (["--data", "IMAGES", "--source", "idx"], "has neither"),
        (["--data", "IMAGES", "--source", "tfds/mnist"], "is a stream"),
        (["--data", "IMAGES", "--batch", "0"], "--batch 0: give 1 or more"),
        (["--data", "IMAGES", "--limit", "-3"], "--limit -3: give 1 or more"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(files, images, tmp_path, command, capsys, change, message):
    change = [{"IMAGES": images, "EMPTY": tmp_path}.get(item, item) for item in change]
    assert command("eval", files["compact"], *change) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.timeout(60, func_only=True)  # what makes the model files takes longer
def test_what_is_no_regular_file_does_not_hang(files, images, tmp_path, command, capsys):
    shutil.copytree(images / "val", tmp_path / "val")
    os.mkfifo(tmp_path / "val" / "red" / "pipe.png")
    assert command("eval", files["compact"], "--data", tmp_path, "--workers", 0) == 0
    assert "  32  " in capsys.readouterr().out


def write_shard(images, path, names) -> None:
    """The validation images as a shard whose labels are the places in `names`."""
    with tarfile.open(path / "val-0000.tar", "w") as tar:
        for number, image in enumerate(sorted((images / "val").glob("*/*.png"))):
            label = str(names.index(image.parent.name)).encode()
            for suffix, content in (("png", image.read_bytes()), ("cls", label)):
                member = tarfile.TarInfo(f"{number:05d}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def test_shards_labelled_in_the_usual_order_give_the_folder_s_accuracy(trained, card, images, tmp_path, caplog):
    """The names of the classes are Red, black, blue, green: timm would put Red last, sorted() puts it first."""
    names = sorted([*list(COLOURS)[:3], "Red"])
    renamed = tmp_path / "folders"
    shutil.copytree(images / "val", renamed / "val")
    (renamed / "val" / "red").rename(renamed / "val" / "Red")
    write_shard(renamed, tmp_path, names)
    (tmp_path / "classes.txt").write_text("\n".join(names))
    folders, shards = open_labelled(card, renamed), open_labelled(card, tmp_path, "wds")
    assert folders.class_names == shards.class_names == names == ["Red", "black", "blue", "green"]
    assert sorted(folders.labels) == sorted(shards.labels)
    match_classes(card.replace(class_names=names), shards)
    with pytest.raises(ValueError, match="number 0 is 'Red' in the data and 'black' in the model"):
        match_classes(card, shards)
    older = [*list(COLOURS)[:3], "Red"]  # a file from when classes were in timm's order
    for source in (folders, shards):
        found = match_classes(card.replace(class_names=older), source)
        for index in range(len(found)):
            assert older[found.labels[index]] == names[source.labels[index]]
    assert "classes in timm's order" in caplog.text


def test_data_without_names_are_told(files, images, tmp_path, command, capsys, caplog):
    write_shard(images, tmp_path, list(COLOURS))
    assert command("eval", files["compact"], "--source", "wds", "--data", tmp_path, "--workers", 0) == 0
    assert "the data has no class names" in caplog.text
    (tmp_path / "classes.txt").write_text("\n".join(reversed(COLOURS)))
    capsys.readouterr()
    assert command("eval", files["compact"], "--source", "wds", "--data", tmp_path) == 1
    error = capsys.readouterr().err
    assert "in another order: number 0 is 'red' in the data and 'black' in the model" in error
    assert error.count("\n") == 1


def test_files_with_their_classes_in_different_orders_are_not_compared(trained, images, tmp_path, command, capsys):
    from wbmm.io.files import save_model

    shutil.copytree(images / "val", tmp_path / "val")
    (tmp_path / "val" / "red").rename(tmp_path / "val" / "Red")
    given = []
    for place, names in enumerate((["Red", "black", "blue", "green"], ["black", "blue", "green", "Red"])):
        model = copy.copy(trained)
        model.card = trained.card.replace(class_names=names)
        given.append(save_model(model, tmp_path / f"{place}.safetensors"))
    assert command("eval", *given, "--data", tmp_path, "--workers", 0) == 1
    assert "1.safetensors has its classes in another order than" in capsys.readouterr().err


def test_a_backbone_has_no_accuracy(trained, tmp_path, images, command, capsys):
    import timm

    from wbmm.io.files import save_model

    backbone = timm.create_model("wbmm_a", num_classes=0, dims=(8, 16, 32, 64))
    path = save_model(backbone.eval(), tmp_path / "backbone.safetensors")
    assert command("eval", path, "--data", images) == 1
    assert "is not a classifier" in capsys.readouterr().err


def test_models_with_other_classes_are_not_compared(trained, files, images, tmp_path, card):
    from wbmm.deploy.evaluate import Evaluation, _compared

    first = Evaluation(torch.zeros(3, 4), torch.zeros(3), 1.0)
    with pytest.raises(ValueError, match="cannot be compared"):
        _compared(Evaluation(torch.zeros(3, 7), torch.zeros(3), 1.0), first, card)


def test_outputs_that_are_not_finite_are_an_error(files, card, images):
    runner = open_runner(files["compact"])
    runner._forward = lambda batch: [torch.full((len(batch), 4), float("nan"))]
    with pytest.raises(ValueError, match="not finite for 32 images"):
        collect(runner, open_labelled(card, images), label="x")
