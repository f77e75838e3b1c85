import pytest

from wbmm.train.optim import plan_batch, scale_lr


@pytest.mark.parametrize(
    ("world", "batch", "accumulation"), [(8, 128, 4), (1, 64, 64), (32, 128, 1), (2, 2048, 1), (1, 4096, 1)]
)
def test_accumulation_makes_the_global_batch(world, batch, accumulation):
    plan = plan_batch(4096, batch, world)
    assert (plan.accumulation, plan.global_batch) == (accumulation, 4096)


def test_the_plan_reads_as_arithmetic():
    assert str(plan_batch(4096, 128, 8)) == (
        "global batch 4096 = 8 processes x 128 images x 4 forward passes (accumulated)"
    )
    assert str(plan_batch(64, 64, 1)) == "global batch 64 = 1 process x 64 images x 1 forward pass"


def test_impossible_batch_lists_what_works():
    with pytest.raises(
        ValueError, match=r"not a multiple of 800.*batch=64, batch=128.*global_batch=4000, global_batch=4800"
    ):
        plan_batch(4096, 100, 8)


def test_impossible_number_of_processes_lists_what_works():
    with pytest.raises(ValueError, match=r"3 does not divide 4096.*1, 2, 4, 8 processes work.*global_batch=3840"):
        plan_batch(4096, 128, 3)


def test_what_the_error_suggests_works():
    for world, batch in ((8, 100), (3, 128), (5, 7)):
        with pytest.raises(ValueError) as error:
            plan_batch(4096, batch, world)
        text = str(error.value)
        for size in (int(part.split(",")[0].split(".")[0]) for part in text.split(" global_batch=")[1:]):
            assert plan_batch(size, batch, world).global_batch == size
        for size in (int(part.split(",")[0].split(".")[0]) for part in text.split(" batch=")[2:]):
            if 4096 % world == 0:
                assert plan_batch(4096, size, world).global_batch == 4096


def test_learning_rate_scales_with_the_global_batch_and_says_so():
    lr, text = scale_lr(4e-3, 4096, 1024)
    assert lr == pytest.approx(1e-3)
    assert text == "learning rate 0.004 x 1024/4096 = 0.001 (scaled with the global batch)"
    assert scale_lr(4e-3, 4096, 4096) == (4e-3, "learning rate 0.004")


@pytest.mark.timeout(20)
def test_what_works_is_found_at_once_for_any_number():
    with pytest.raises(ValueError, match=r"batch=101, batch=111, batch=117, batch=143"):
        plan_batch(999_999_999_999, 128, 1)
    with pytest.raises(ValueError, match=r"7 does not divide .* With batch=128, 1, 2, 4, 8 processes work"):
        plan_batch(2**40, 128, 7)
