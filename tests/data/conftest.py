from tests.data.helpers import folder
from tests.fixtures.one_thread import one_thread

__all__ = ["folder", "one_thread"]
