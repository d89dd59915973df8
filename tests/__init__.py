import pytest

pytest.register_assert_rewrite("tests.support")  # so that a failed assertion there says what it compared
