from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs

def create_py_executor(llm_args: TorchLlmArgs, checkpoint_dir: str | None = ...) -> PyExecutor: ...
