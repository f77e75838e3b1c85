"""Published weights where there is no network."""

import pytest
import timm

from wbmm.models import hub
from wbmm.models.state import CheckpointError


@pytest.fixture
def asked(monkeypatch):
    """No cache and no network; the addresses that were asked for."""
    found = []

    def refuse(request, timeout):
        found.append((request.full_url, timeout))
        raise OSError("no route")

    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(hub.urllib.request, "urlopen", refuse)
    return found


def test_one_retry_then_one_line_with_the_address_and_file(asked):
    with pytest.raises(CheckpointError) as error:
        timm.create_model("wbmm_t", pretrained=True)
    text = str(error.value)
    assert len(asked) == 2
    assert asked[0][0] in text
    assert asked[0][0].endswith("/wansong-s/WBMM/resolve/main/wbmm_t_in1k_224_w7.pth")
    assert 'file="wbmm_t_in1k_224_w7.pth"' in text
    assert "no route" in text
    assert "\n" not in text


def test_a_model_without_published_weights_asks_nobody(asked):
    assert hub.published_weights("wbmm_a") is None
    assert hub.published_weights("wbmm_t.other") is None
    assert asked == []


def test_what_is_in_the_cache_needs_no_network(asked, monkeypatch):
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: "/cache/file.pth")
    assert str(hub.published_weights("wbmm_t")) == "/cache/file.pth"
    assert asked == []
