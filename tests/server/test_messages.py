"""Messages: what is in them, byte for byte, and that nothing else is ever read out of them."""

from __future__ import annotations

import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partwise.checkpoint import from_bytes, to_bytes
from partwise.metrics import Sums
from partwise.model.partition import frozen, keyed, local, partition
from partwise.model.spec import Model
from partwise.server import messages
from partwise.server.encoding import fixed_point
from partwise.server.mean import mean
from partwise.server.messages import About, Invitation
from partwise.server.report_form import PRECISIONS, ReportForm
from partwise.server.total import Contribution
from partwise.types import UserError

KEYS = {"item": np.array([0, 3])}
LEAVES = {
    "table": np.arange(8, dtype=np.float32).reshape(4, 2),
    "bias": np.array([0.5], np.float32),
    "scale": np.float32(2).reshape(()),
}


def parts_with(psi="take"):
    start = {path: jnp.asarray(leaf) for path, leaf in LEAVES.items()} | {"user": jnp.zeros(2)}
    rules = {"table": keyed("item", psi=psi), "user": local(), "scale": frozen()}
    return partition(Model(lambda rng: start, None, None), rules)


PARTS = parts_with()
RNG = jax.random.key(3)
ABOUT = About("run", 7, "t" * 32, PARTS.digest)
SENT = Contribution(
    {"table": np.ones((2, 2), np.float32), "bias": np.array([4.0], np.float32)},
    np.float32(2),
    np.float32(1),
    Sums(np.float32(3), np.float32(2)),
    np.asarray(True),
)
FORM = ReportForm(mean(), PARTS)


@pytest.mark.parametrize("psi", ["take", "float16", "int8"])
@pytest.mark.parametrize("where", [np.asarray, jnp.asarray])
def test_slices_come_back_as_psi_decodes_them(psi, where):
    parts = parts_with(psi)
    params = {path: where(leaf) for path, leaf in LEAVES.items()}
    data = messages.send(parts, params, KEYS, jax.random.key(3))
    found = messages.read_slices(parts, data, KEYS)
    rows = LEAVES["table"][[0, 3]]
    np.testing.assert_allclose(found.params["table"], parts.roles["table"].psi.received(jnp.asarray(rows)))
    np.testing.assert_array_equal(found.params["bias"], LEAVES["bias"])
    np.testing.assert_array_equal(found.params["scale"], 2)
    np.testing.assert_array_equal(found.rng, jax.random.key_data(jax.random.key(3)))
    assert set(found.params) == {"table", "bias", "scale"}
    assert found.about.model == parts.digest


@pytest.mark.parametrize("psi", ["take", "float16", "int8"])
def test_a_row_is_sent_alone_as_among_others(psi):
    parts = parts_with(psi)
    rows = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)
    together = messages.encode_rows(parts, "table", rows, np.arange(64))
    for key in range(64):
        for name, part in messages.encode_rows(parts, "table", rows, np.array([key])).items():
            assert part.tobytes() == together[name][key : key + 1].tobytes()


def test_a_header_must_say_its_rng():
    arrays, header = from_bytes(messages.send(PARTS, LEAVES, KEYS, jax.random.key(3), ABOUT))
    for wrong in (None, 3, [0, -1], [0, 1 << 32], [0.5, 1], ["0", "3"]):
        with pytest.raises(UserError, match="must say its rng"):
            messages.read_slices(PARTS, to_bytes(arrays, header | {"rng": wrong}), KEYS)


def test_numbers_for_every_client_come_back_to_the_last_bit():
    numbers = {"clip": np.float32(0.1), "other": np.float32(3e-39)}
    found = messages.read_slices(PARTS, messages.send(PARTS, LEAVES, KEYS, RNG, ABOUT, numbers), KEYS)
    assert found.public == numbers
    assert all(type(each) is np.float32 for each in found.public.values())
    plain = messages.send(PARTS, LEAVES, KEYS, RNG, ABOUT)
    assert plain == messages.send(PARTS, LEAVES, KEYS, RNG, ABOUT, {})
    assert "public" not in from_bytes(plain)[1]
    assert messages.read_slices(PARTS, plain, KEYS).public == {}


def test_what_every_client_is_told_must_be_numbers():
    arrays, header = from_bytes(messages.send(PARTS, LEAVES, KEYS, RNG, ABOUT))
    for wrong in (None, 3, [0.5], {"clip": "1"}, {"clip": None}, {"clip": True}, {"clip": 1e39}):
        with pytest.raises(UserError, match="must be finite numbers"):
            messages.read_slices(PARTS, to_bytes(arrays, header | {"public": wrong}), KEYS)


def test_what_is_asked_for_must_be_what_came():
    data = messages.send(PARTS, LEAVES, KEYS, jax.random.key(3))
    with pytest.raises(UserError, match=r"'table:rows' in the slices is float32 \[2, 2\], and must be"):
        messages.read_slices(PARTS, data, {"item": np.arange(3)})
    with pytest.raises(UserError, match=r"lacks 'table:float16'|no business with 'table:rows'"):
        messages.read_slices(parts_with("float16"), data, KEYS)


def test_another_partition_has_another_digest():
    digests = {parts_with(psi).digest for psi in ("take", "float16", "int8")}
    assert len(digests) == 3
    wider = {path: jnp.zeros((5, 2)) if path == "table" else leaf for path, leaf in LEAVES.items()}
    model = Model(lambda rng: wider | {"user": jnp.zeros(2)}, None, None)
    assert partition(model, dict(PARTS.roles)).digest not in digests
    assert parts_with().digest == PARTS.digest


def test_a_model_of_other_roles_is_refused():
    other = messages.send(PARTS, LEAVES, KEYS, jax.random.key(3), ABOUT._replace(model="0" * 32))
    with pytest.raises(UserError, match="of another model"):
        messages.read_slices(PARTS, other, KEYS)


def test_a_report_comes_back_to_the_bit():
    data = FORM.write(ABOUT, SENT)
    found, _ = FORM.read(data, KEYS)
    assert messages.about(data) == ABOUT
    for a, b in zip(*map(jax.tree_util.tree_leaves, (found, SENT)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_report_that_is_not_valid_says_nothing_else():
    data = FORM.write(ABOUT, SENT._replace(valid=np.asarray(False)))
    arrays, header = from_bytes(data)
    assert arrays == {}
    assert header == {"format": 1, "kind": "report", **ABOUT._asdict(), "valid": False}
    assert not FORM.read(data, KEYS)[0].valid


@pytest.mark.parametrize("precision", ["float32", "float16", "int8"])
@given(values=st.lists(st.floats(-1e4, 1e4, width=32), min_size=5, max_size=5))
def test_a_rounded_report_is_off_by_no_more_than_is_stated(precision, values):
    form, psi = ReportForm(mean(), PARTS, precision), PRECISIONS[precision]
    update = {
        "table": np.array(values[:4], np.float32).reshape(2, 2),
        "bias": np.array(values[4:], np.float32),
    }
    found, _ = form.read(form.write(ABOUT, SENT._replace(update=update)), KEYS)
    for path, leaf in update.items():
        rows = leaf if path == "table" else leaf[None]
        bound = np.asarray(psi.bound(jnp.asarray(rows)))[:, None] + 1e-30
        assert np.all(np.abs(found.update[path].reshape(rows.shape) - rows) <= bound)
        assert found.update[path].dtype == leaf.dtype


def test_int8_takes_about_a_quarter_of_the_bytes():
    parts = ReportForm(mean(), PARTS, "int8").shapes({"item": 1000})
    size = sum(each.size * each.dtype.itemsize for each in parts.values())
    assert size == 16 + 1000 * (2 + 4) + (1 + 4)  # sums, rows of two with a scale each, one shared row


def test_a_report_whose_keys_the_server_does_not_know_names_them():
    form = ReportForm(mean(), PARTS)
    found, keys = form.read(form.write(ABOUT, SENT, KEYS), None)
    np.testing.assert_array_equal(keys["item"], KEYS["item"])
    np.testing.assert_array_equal(found.update["table"], SENT.update["table"])
    with pytest.raises(UserError, match="must have '#keys:item'"):
        form.read(form.write(ABOUT, SENT), None)
    np.testing.assert_array_equal(form.read(form.write(ABOUT, SENT, KEYS), KEYS)[1]["item"], KEYS["item"])
    with pytest.raises(UserError, match="names other keys of 'item' than its task has"):
        form.read(form.write(ABOUT, SENT, KEYS), {"item": np.array([0, 2])})
    with pytest.raises(UserError, match=r"'table' in the report is float32 \[2, 2\]"):
        form.read(form.write(ABOUT, SENT, {"item": np.arange(3)}), None)


def test_precisions_that_cannot_be():
    with pytest.raises(UserError, match=r"int4.*int8"):
        ReportForm(mean(), PARTS, "int4")
    with pytest.raises(UserError, match="whole numbers"):
        ReportForm(fixed_point(mean(), 20), PARTS, "int8")


def test_a_task_comes_back():
    task = Invitation(ABOUT, "ann", seed=2**40, round=7)
    assert messages.read_invitation(messages.write_invitation(task)) == task


@pytest.mark.parametrize("wrong", [{"client": 3}, {"seed": "1"}, {"round": None}, {"run": 1}])
def test_an_invitation_that_does_not_say_all_is_refused(wrong):
    arrays, header = from_bytes(messages.write_invitation(Invitation(ABOUT, "ann", 1, 2)))
    with pytest.raises(UserError, match=f"must say its {next(iter(wrong))}"):
        messages.read_invitation(to_bytes(arrays, header | wrong))


def test_bytes_of_format_1():
    """Golden: if this changes, so must FORMAT, for others read these bytes."""
    report = FORM.write(ABOUT._replace(model="m"), SENT)
    slices = messages.send(PARTS, LEAVES, KEYS, jax.random.key(3), ABOUT._replace(model="m"))
    task = messages.write_invitation(Invitation(ABOUT._replace(model="m"), "ann", 1, 2))
    header = json.loads(report[8 : 8 + int.from_bytes(report[:8], "little")])
    assert {name: part["dtype"] for name, part in header.items() if name != "__metadata__"} == {
        "#sums": "F32",
        "bias": "F32",
        "table": "F32",
    }
    digests = [hashlib.sha256(data).hexdigest()[:16] for data in (report, slices, task)]
    assert digests == ["c8e5d20a38f7760a", "be262839d2d0f11f", "80326bd25c4b8e7c"]


@given(st.integers(0, 10_000), st.integers(0, 255), st.integers(0, 400))
def test_damaged_bytes_are_refused_or_read_as_a_report(place, value, cut):
    """Whatever a bit flip or a cut does: a clear error, or arrays of the right shapes."""
    data = bytearray(FORM.write(ABOUT, SENT))
    data[place % len(data)] = value
    damaged = bytes(data[: len(data) - cut if cut < 50 else None])
    try:
        found, _ = FORM.read(damaged, KEYS)
    except UserError:
        return
    if found.valid:
        assert {path: leaf.shape for path, leaf in found.update.items()} == {"table": (2, 2), "bias": (1,)}


def test_too_large_is_refused_before_it_is_parsed(monkeypatch):
    monkeypatch.setattr(messages, "from_bytes", lambda data: pytest.fail("parsed"))
    monkeypatch.setattr(messages, "header_of", lambda *given: pytest.fail("parsed"))
    large = to_bytes({"bias": np.zeros(1 << 19, np.float32)})
    with pytest.raises(UserError, match=r"2,09\d,\d+ bytes is too large"):
        FORM.read(large, KEYS)
