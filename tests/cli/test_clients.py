"""A client on its own: personalize and predict."""

from __future__ import annotations


def test_an_unseen_client_personalizes_refreshes_and_predicts(output, run_folder, tmp_path):
    mine, wanted, local = tmp_path / "mine.csv", tmp_path / "wanted.csv", str(tmp_path / "local.safetensors")
    mine.write_text("item,rating\n1,4.5\n2,3.0\n7,2.0\n999,5\n")
    wanted.write_text("item\n3\n999\n4\n")
    told = output("personalize", str(run_folder), "--client", str(mine), "--out", local)
    assert (told["examples"], told["unknown"]) == (3, {"item": 1})
    again = str(tmp_path / "again.safetensors")
    output("personalize", str(run_folder), "--client", str(mine), "--local", local, "--out", again)
    predicted = output("predict", str(run_folder), "--local", local, "--client", str(wanted))
    assert [(row["row"], row["item"]) for row in predicted["predictions"]] == [(1, 3), (3, 4)]
    assert all(0 < row["output"] < 8 for row in predicted["predictions"])


def test_a_table_of_several_clients_asks_which_one_is_meant(output, mistake, run_folder, tmp_path):
    table, local = tmp_path / "table.csv", str(tmp_path / "local.safetensors")
    table.write_text("item,rating,user\n1,4.5,ann\n2,3.0,bob\n7,2.0,ann\n999,1.0,bob\n")
    arguments = ("personalize", str(run_folder), "--client", str(table), "--out", local)
    text = mistake(*arguments)
    assert "holds rows of 2 clients (column 'user')" in text
    assert "--id ann" in text
    assert "unknown client 'anne' (nearest: ann)" in mistake(*arguments, "--id", "anne")
    told = output(*arguments, "--id", "bob")
    assert (told["examples"], told["unknown"]) == (1, {"item": 1})
    predict = ("predict", str(run_folder), "--local", local, "--client", str(table))
    assert "--id ann" in mistake(*predict)
    assert [row["row"] for row in output(*predict, "--id", "ann")["predictions"]] == [1, 3]
    table.write_text("item,rating\n1,4.5\n")
    assert "has no column 'user'" in mistake(*arguments, "--id", "ann")


def test_a_local_part_of_another_model_is_refused(mistake, run_folder, tmp_path):
    import numpy as np

    from partwise.runs.personal import save_local

    mine, local = tmp_path / "mine.csv", tmp_path / "local.safetensors"
    mine.write_text("item,rating\n1,4.5\n")
    save_local(local, {"user": np.zeros(5, np.float32)}, "other")
    both = ("--local", str(local), "--client", str(mine))
    text = mistake("predict", str(run_folder), *both)
    assert "it was rebuilt for another model. Rebuild it for this one" in text
    assert "goes on from it" not in text  # personalize would refuse it
    table = ("--local", str(mine), "--client", str(mine))
    assert f"'{mine}' is not a local part, or is damaged: `partwise personalize` writes one" in mistake(
        "predict", str(run_folder), *table
    )
    text = mistake("personalize", str(run_folder), *both, "--out", str(tmp_path / "new"))
    assert "has user (5,), and the model needs user (3,)" in text


def test_client_files_with_mistakes(mistake, tmp_path, run_folder):
    mine, local = tmp_path / "mine.csv", str(tmp_path / "local.safetensors")
    mine.write_text("item,rating\n998,4\n999,5\n")
    arguments = ("personalize", str(run_folder), "--client", str(mine), "--out", local)
    assert "of its 2 rows none names" in mistake(*arguments)
    mine.write_text("film,rating\n1,4\n")
    assert "unknown column 'item'" in mistake(*arguments)
    mine.write_text("item,rating\n1,4\n")
    model = run_folder / "model.safetensors"
    assert "not a local part" in mistake(
        "predict", str(run_folder), "--local", str(model), "--client", str(mine)
    )


def test_a_model_of_text_says_that_it_reads_no_tables(run_folder, tmp_path):
    """Words are in the order of their frequency, in which they could not be found."""
    import numpy as np
    import pytest

    from partwise.runs.personal import Personal
    from partwise.types import UserError

    mine = tmp_path / "mine.csv"
    mine.write_text("item,rating\nthe,4.5\n")
    personal = Personal.open(run_folder)
    personal.vocabularies = {"item": np.array(["the", "a", "zebra"])}
    with pytest.raises(UserError, match=r"column 'item' of this model was made of text.*docs/data\.md"):
        personal.read(mine, ("item", "rating"))
