import pytest
import torch
import transformers


@pytest.fixture(autouse=True, scope="session")
def quiet_and_single_threaded():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
