"""vLLM's worker for GPUs, with our drawing. vLLM loads the class by its name (``worker_cls``, see engine_args)."""

from vllm.v1.worker.gpu_worker import Worker

from twinkle.sampler.vllm import samplers, server_watch


class DrawingGpuWorker(Worker):  # type: ignore[misc]  # without vLLM it is Any
    """A worker that ends with the server and draws tokens as the torch sampler does."""

    def init_device(self) -> None:
        server_watch.end_with_server(self.vllm_config.additional_config)
        super().init_device()

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights=load_dummy_weights)
        samplers.install(self)
