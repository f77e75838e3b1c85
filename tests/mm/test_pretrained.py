"""Starting weights: from our files, released ones, segmentors and the hub; what is reported, and what is refused."""

import dataclasses
import hashlib
import http.server
import threading
import time
from pathlib import Path

import pytest
import timm
import torch

import wbmm
from tests.helpers import randomize
from tests.mm.helpers import NARROW, Bomb, backbone, checkpoint, released_dense_backbone
from wbmm.mm import pretrained
from wbmm.mm.backbone import WBMMBackbone
from wbmm.mm.pretrained import load_pretrained
from wbmm.models.state import CheckpointError
from wbmm.zoo import load_zoo


def classifier(name="wbmm_a_hier", seed=0, **kwargs):
    return randomize(timm.create_model(name, **{"dims": (8, 16, 32, 64), "num_classes": 5, **kwargs}), seed)


def save(path, contents):
    torch.save(contents, path)
    return str(path)


def test_from_a_training_checkpoint_of_ours(tmp_path):
    source, ema = classifier(), classifier(seed=1)
    file = save(tmp_path / "best.pt", {"model": source.state_dict(), "ema": ema.state_dict(), "step": 3})
    model = WBMMBackbone(**NARROW, init_cfg={"type": "Pretrained", "checkpoint": file})
    text = load_pretrained(model, file)
    torch.testing.assert_close(model.stages.state_dict(), ema.stages.state_dict())
    own = [k for k in model.state_dict() if not k.endswith("num_batches_tracked")]
    assert f"{len(own) - 8} of {len(own)} tensors match" in text
    assert "and new: norm0.weight, norm0.bias" in text
    assert "not used: head.norm.weight, head.norm.bias, head.fc.weight, head.fc.bias" in text
    assert model.norm0.weight.eq(1).all()


def test_from_a_segmentor_with_its_output_norms(tmp_path):
    source = backbone()
    file = save(tmp_path / "iter_3.pth", checkpoint(source))
    model = WBMMBackbone(**NARROW)
    assert "and new" not in load_pretrained(model, file)
    torch.testing.assert_close(model.state_dict(), source.state_dict())


def test_from_the_hub_by_name(tmp_path, monkeypatch):
    released = released_dense_backbone("wbmm_t_dense", values=False)
    released["stages.0.0.dwconv.relative_position_bias_table"] = torch.randn(80, 169)
    file, asked = save(tmp_path / "released.pth", {"model": released}), []
    monkeypatch.setattr("wbmm.mm.pretrained.download_from_hf", lambda *args: asked.append(args) or file)
    model = WBMMBackbone(arch="wbmm_t_dense")
    for name in ("wbmm_t_dense", "wbmm_t_dense.in1k"):
        load_pretrained(model, name)
        assert asked[-1] == ("wansong-s/WBMM", "wbmm_t_in1k_224_dense_w7.pth")
    table = released["stages.0.0.dwconv.relative_position_bias_table"]
    torch.testing.assert_close(model.stages[0].blocks[0].mixer.table.data, table)

    def fail(*args):
        raise OSError("no route to host")

    monkeypatch.setattr("wbmm.mm.pretrained.download_from_hf", fail)
    with pytest.raises(
        CheckpointError, match=r"wbmm_t_dense: could not be downloaded .no route to host.; give a local"
    ):
        load_pretrained(model, "wbmm_t_dense")


def test_through_init_weights_of_mmengine(tmp_path, capsys):
    pytest.importorskip("mmengine")
    source = classifier()
    file = save(tmp_path / "a.pth", source.state_dict())
    model = WBMMBackbone(**NARROW, init_cfg={"type": "Pretrained", "checkpoint": file})
    model.init_weights()
    torch.testing.assert_close(model.stages.state_dict(), source.stages.state_dict())
    WBMMBackbone(**NARROW).init_weights()  # without init_cfg it is a no-op


def test_other_windows(tmp_path):
    file = save(tmp_path / "dense.pth", classifier("wbmm_a_dense").state_dict())
    model = WBMMBackbone(**NARROW)
    with pytest.raises(
        CheckpointError, match=r"(?s)To interpolate tables.*configuration: model.backbone.init_cfg.resize_tables=True"
    ):
        load_pretrained(model, file)
    load_pretrained(model, file, resize_tables=True)
    mixer = model.stages[0].blocks[0].mixer
    assert mixer.table.shape == (8, 27 * 27)
    assert mixer.table.abs().max() > 0
    assert mixer.local_table.eq(0).all()
    assert model.norm0.weight.eq(1).all()


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (lambda: {"conv1.weight": torch.zeros(1)}, "0 of the backbone's .* match; 90% must.*is of no WBMM model"),
        (lambda: classifier("wbmm_a_hier", dims=(16, 16, 32, 64)).state_dict(), r"looks like a model outside the zoo"),
        (lambda: wbmm.fuse(classifier().eval()).state_dict(), "A fused checkpoint cannot go back to the training form"),
        (lambda: {"step": 3}, "no state dict found"),
        (
            lambda: timm.create_model("wbmm_a_hier").state_dict(),
            r"may be of another shape \(stem.conv1.weight is \(.*\) in the file and \(4, 3, 3, 3\) in the backbone\)"
            r".*In a configuration: model.backbone.arch='wbmm_a_hier'",
        ),
    ],
)
def test_too_little_matches(tmp_path, contents, message):
    file = save(tmp_path / "a.pth", contents())
    model = WBMMBackbone(**NARROW)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=rf"(?s)a\.pth: .*{message}"):
        load_pretrained(model, file)
    torch.testing.assert_close(model.state_dict(), before)


def test_a_name_that_is_nowhere():
    with pytest.raises(CheckpointError, match=r"wbmm_t_hier: there is no such file, and no weights .*wbmm_t_dense"):
        load_pretrained(WBMMBackbone(**NARROW), "wbmm_t_hier")
    with pytest.raises(CheckpointError, match=r"init_cfg.checkpoint=FILE"):
        load_pretrained(WBMMBackbone(**NARROW), "runs/wbmm_t_hier/best.pt")
    with pytest.raises(CheckpointError, match=r"no such file"):
        load_pretrained(WBMMBackbone(**NARROW), "wbmm_t_dense.in22k")


def test_a_wrong_prefix(tmp_path):
    file = save(tmp_path / "a.pth", checkpoint(backbone()))
    with pytest.raises(CheckpointError, match=r"no key starts with 'teacher\.'; the first is 'backbone\."):
        load_pretrained(WBMMBackbone(**NARROW), file, prefix="teacher")


def test_a_malicious_pickle_never_runs(tmp_path):
    target, file = tmp_path / "pwned", save(tmp_path / "evil.pth", {"model": Bomb(tmp_path / "pwned")})
    model = WBMMBackbone(**NARROW, init_cfg={"type": "Pretrained", "checkpoint": file})
    with pytest.raises(CheckpointError, match=r"refused.*could run code"):
        model.init_weights()
    assert not target.exists()


class Handler(http.server.BaseHTTPRequestHandler):
    """Sends `server.body`, well or badly as the path says."""

    def do_GET(self):
        self.server.asked += 1
        body = self.server.body
        if "hang" in self.path:
            time.sleep(1)
        elif "missing" in self.path:
            self.send_error(404)
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if "cut" in self.path else body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Serves a checkpoint of ours from this machine."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.asked, running.url = 0, f"http://127.0.0.1:{running.server_port}"
        running.body = Path(save(tmp_path / "served.pth", classifier().state_dict())).read_bytes()
        running.cache = tmp_path / "hub"
        monkeypatch.setattr(torch.hub, "get_dir", lambda: str(running.cache))
        threading.Thread(target=running.serve_forever, args=(0.05,), daemon=True).start()
        yield running
        running.shutdown()


def know(monkeypatch, name, sha256):
    """Puts a checksum into the zoo."""
    entry = {"hub": "x/y", "file": name, "sha256": sha256}
    zoo = {**load_zoo(), "wbmm_f": dataclasses.replace(load_zoo()["wbmm_f"], weights={"in1k": entry})}
    monkeypatch.setattr(pretrained, "load_zoo", lambda: zoo)


def test_over_http_without_a_checksum(server, caplog):
    model = WBMMBackbone(**NARROW, init_cfg={"type": "Pretrained", "checkpoint": f"{server.url}/a.pth"})
    model.init_weights()
    torch.testing.assert_close(model.stages.state_dict(), classifier().stages.state_dict())
    assert "no checksum is known for this file, so it is whatever 127.0.0.1 has sent" in caplog.text
    load_pretrained(model, f"{server.url}/a.pth")
    assert server.asked == 1  # the second time, it was there
    load_pretrained(model, f"{server.url}/other/a.pth")
    assert server.asked == 2  # another file of the same name


def test_over_http_with_a_checksum(server, monkeypatch, caplog):
    know(monkeypatch, "a.pth", hashlib.sha256(server.body).hexdigest())
    load_pretrained(WBMMBackbone(**NARROW), f"{server.url}/a.pth")
    assert "checksum" not in caplog.text
    know(monkeypatch, "a.pth", "0" * 64)
    for place in ("a.pth", "new/a.pth"):  # downloaded before, and now
        with pytest.raises(
            CheckpointError, match=r"a\.pth: its SHA-256 is .*, and 0{16}\.\.\. of the published a\.pth"
        ):
            load_pretrained(WBMMBackbone(**NARROW), f"{server.url}/{place}")


def test_the_hubs_file_is_compared_too(server, tmp_path, monkeypatch):
    know(monkeypatch, "served.pth", "0" * 64)
    monkeypatch.setattr("wbmm.mm.pretrained.download_from_hf", lambda *args: str(tmp_path / "served.pth"))
    with pytest.raises(CheckpointError, match=r"wbmm_f: its SHA-256 is"):
        load_pretrained(WBMMBackbone(**NARROW), "wbmm_f")


@pytest.mark.parametrize(
    ("place", "message"),
    [("missing.pth", "HTTP Error 404"), ("cut.pth", r"\d+ of \d+ bytes came"), ("hang.pth", "timed out")],
)
def test_bad_servers(place, message, server, monkeypatch):
    monkeypatch.setattr(pretrained, "TIMEOUT_S", 0.3)
    with pytest.raises(
        CheckpointError, match=rf"{place}: could not be downloaded \(.*{message}.*\); give a local file"
    ):
        load_pretrained(WBMMBackbone(**NARROW), f"{server.url}/{place}")
    assert not list(server.cache.rglob("*.pth"))


def test_a_malicious_download_never_runs(server, tmp_path):
    server.body = Path(save(tmp_path / "evil.pth", {"model": Bomb(tmp_path / "pwned")})).read_bytes()
    with pytest.raises(CheckpointError, match=r"refused.*could run code"):
        load_pretrained(WBMMBackbone(**NARROW), f"{server.url}/evil.pth")
    assert not (tmp_path / "pwned").exists()


def test_odd_keys_are_shown_and_not_obeyed(tmp_path):
    file = save(tmp_path / "a.pth", {"\x1b]0;pwned\x07.weight": torch.zeros(1), "a\nb": torch.zeros(1)})
    for prefix, message in ((None, "is of no WBMM model"), ("teacher", "the first is")):
        with pytest.raises(CheckpointError, match=message) as caught:
            load_pretrained(WBMMBackbone(**NARROW), file, prefix=prefix)
        assert "\x1b" not in str(caught.value)
        assert r"x1b]0;pwned" in str(caught.value)
    file = save(tmp_path / "b.pth", {"\x1b[2J": torch.zeros(1), **classifier().state_dict()})
    assert r"in the file and not used: \x1b[2J, head.norm.weight" in load_pretrained(WBMMBackbone(**NARROW), file)
