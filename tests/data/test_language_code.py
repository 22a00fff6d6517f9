"""Codes of languages: what a recipe may name is what a client of its server may ask for."""

import pytest

from sbkit.data.language_code import LANGUAGE_CODE, may_be_same, primary


@pytest.mark.parametrize("code", ["en", "zh-CN", "pt_BR", "nan-tw", "rm-sursilv", "und", "mul", "ast"])
def test_codes_of_common_voice_and_of_clients_are_accepted(code):
    assert code in LANGUAGE_CODE
    assert may_be_same(code, primary(code))


@pytest.mark.parametrize("name", ["klingon", "english", "none", "e", "en fr", "", None, 3])
def test_names_of_languages_are_no_codes(name):
    assert name not in LANGUAGE_CODE


@pytest.mark.parametrize(("asked", "model", "same"), [
    ("en", "en", True), ("en-GB", "en_US", True), ("EN", "en", True), ("fr", "en", False), ("fr", "klingon", False),
    ("fr", "mul", True), ("fr", "und", True), ("fr", None, True), ("", "en", True)])
def test_a_client_may_ask_for_the_models_language_or_of_any_if_it_has_several(asked, model, same):
    assert may_be_same(asked, model) is same
