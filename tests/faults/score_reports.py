"""Messages of other programs at the end of a run's log, in their own words, for the score of diagnoses."""

from __future__ import annotations

from diagnosis_score import Case, log

SRT = "/sgl-workspace/sglang/python/sglang/srt/"
MCORE = "/opt/Megatron-LM/megatron/core/"


def _raised(error: str, *places: str) -> str:
    """The end of a traceback whose frames are in these files, as "file:function"."""
    frames = (place.rsplit(":", 1) for place in places)
    lines = "".join(f'  File "{file}", line 812, in {function}\n    step()\n' for file, function in frames)
    return f"Traceback (most recent call last):\n{lines}{error}\n"


def _rank(text: str) -> str:
    """The same lines as Ray prints those of a worker on another node."""
    return "".join(f"(TrainerRank pid=48213, ip=10.0.3.7) {line}\n" for line in text.splitlines())


def _engine(text: str) -> str:
    """The same lines with the prefix of an engine of SGLang."""
    return "".join(f"[2025-11-04 03:12:55 TP1] {line}\n" for line in text.splitlines())


NCCL_FAILED = (
    "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1970, "
    "unhandled {} error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5\n{}\nLast error:\n{}"
)
OLD_OOM = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 594.00 MiB (GPU 3; 79.15 GiB total capacity; "
    "77.39 GiB already allocated; 310.25 MiB free; 78.03 GiB reserved in total by PyTorch)"
)

MEMORY = (
    log("memory of NCCL", "MEM02",
        _rank(_raised(NCCL_FAILED.format("cuda", "ncclUnhandledCudaError: Call to CUDA function failed.",
                                         "Cuda failure 2 'out of memory'"),
                      "/opt/furlong/training/ranks/worker.py:train"))),
    log("memory of the optimizer, PyTorch 2.0's words", "MEM02",
        _rank(_raised(OLD_OOM, f"{MCORE}optimizer/distrib_optimizer.py:step"))),
    log("memory of the cross entropy", "MEM02",
        _rank(_raised("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 18.55 GiB.",
                      f"{MCORE}tensor_parallel/cross_entropy.py:forward")), {"max_tokens_per_gpu": 16384},
        remedy="--max-tokens-per-gpu"),
    log("memory of cuBLAS", "MEM02",
        _raised("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
                "torch/nn/modules/linear.py:forward")),
    log("CUDA graphs that do not fit", "MEM02",
        _engine("Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 288.00 MiB.\n"
                "Possible solutions:\n1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)"),
        remedy="--sglang-mem-fraction-static"),
    log("an engine out of memory while decoding", "MEM02",
        _engine("Decode out of memory. Try to lower your batch size.\nTry to decode 4096 tokens."),
        remedy="--sglang-"),
    log("an engine out of memory in prefill", "MEM02",
        _engine("RuntimeError: Prefill out of memory. Try to lower your batch size.\nTry to allocate 8192 tokens."),
        remedy="--sglang-"),
    log("a driver that is out of memory", "MEM02",
        _engine(_raised("RuntimeError: CUDA driver error: out of memory", f"{SRT}mem_cache/memory_pool.py:__init__"))),
    log("Ray's memory monitor", "MEM02",
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\nMemory on the node "
        "(IP: 10.0.3.7, ID: 9f) where the task (actor ID: 12, name=TrainerRank, pid=4821, memory used=91.40GB) was "
        "running was 503.11GB / 527.00GB (0.954656), which exceeds the memory usage threshold of 0.95."),
    log("Slurm's memory limit", "MEM02 KILL01",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=48812.batch. Some of the step tasks have been OOM "
        "Killed."),
    log("a fork without memory", "MEM02",
        _raised("OSError: [Errno 12] Cannot allocate memory", "/usr/lib/python3.12/subprocess.py:_execute_child")),
    log("memory that the engine does not get back, newer words", "MEM03",
        _engine("[torch_memory_saver.cpp] CUresult error: 2 (out of memory)  file=csrc/utils.h func=cu_mem_create "
                "line=104"), {"colocate": True}),
    log("pinned memory", "MEM02",
        _raised("RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some "
                "other API call", "torch/utils/_pin_memory.py:pin_memory")),
)  # fmt: skip

ENGINES = (
    log("an illegal access seen by C++", "ENG01",
        _engine("terminate called after throwing an instance of 'c10::AcceleratorError'\n  what():  CUDA error: an "
                "illegal memory access was encountered\nFatal Python error: Aborted\n"
                f'  File "{SRT}managers/scheduler.py", line 931 in event_loop_overlap')),
    log("an illegal access in Triton", "ENG01",
        _engine("Scheduler hit an exception: " + _raised("RuntimeError: Triton Error [CUDA]: an illegal memory access "
                                                         "was encountered", f"{SRT}layers/moe/fused_moe.py:forward"))),
    log("an illegal access in a kernel's own words", "ENG01",
        _engine("Failed: Cuda error /sgl-kernel/csrc/allreduce/custom_all_reduce.cuh:451 'an illegal memory access was "
                "encountered'"), remedy="--sglang-"),
    log("an illegal address", "ENG01",
        _engine(_raised("torch.AcceleratorError: CUDA error: cudaErrorIllegalAddress",
                        f"{SRT}model_executor/cuda_graph_runner.py:replay"))),
    log("inductor's error around JSON", "ENG02",
        _raised("torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:\nJSONDecodeError: Expecting "
                "value: line 1 column 1 (char 0)", "torch/_inductor/runtime/autotune_cache.py:_read"),
        remedy="TORCHINDUCTOR_FORCE_DISABLE_CACHES=1"),
    log("inductor's error, newer words", "ENG02",
        _engine("torch._inductor.exc.InductorError: JSONDecodeError: Extra data: line 1 column 5 (char 4)")),
    log("a cut pickle of inductor", "ENG02",
        _raised("EOFError: Ran out of input", "torch/_inductor/codecache.py:_lookup_graph"),
        remedy="TORCHINDUCTOR_FORCE_DISABLE_CACHES=1"),
    log("a cut library of the compiler", "ENG02",
        _raised("ImportError: /cache/torchinductor/ab/cabc.so: file too short", "torch/_inductor/codecache.py:load")),
    log("a child of SGLang that failed", "ENG03",
        "Received sigquit from a child process. It usually means the child failed."),
    log("a scheduler that is dead", "ENG03", "Rank 0 scheduler is dead. Please check if there are relevant logs.\n"
        "Exit code: -9"),
    log("a server that disconnects", "ENG03 ENG05 ENG06",
        _raised("httpx.RemoteProtocolError: Server disconnected without sending a response.",
                "furlong/inference/sglang/client.py:post")),
    log("an actor whose process died", "ENG03",
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n\tclass_name: "
        "TrainerRank\nThe actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker "
        "exit detail: Worker unexpectedly exits with a connection error code 2. End of file. There are some potential "
        "root causes. (1) The process is killed by SIGKILL by OOM killer due to high memory usage. (2) ray stop "
        "--force is called.", without="--use-fault-tolerance"),
    log("an engine that refuses connections, urllib3", "ENG05",
        "urllib3.exceptions.MaxRetryError: HTTPConnectionPool(host='10.0.3.8', port=15000): Max retries exceeded with "
        "url: /health_generate (Caused by NewConnectionError('<urllib3.connection.HTTPConnection object at 0x7f>: "
        "Failed to establish a new connection: [Errno 111] Connection refused'))"),
    log("an engine that refuses connections, aiohttp", "ENG05",
        "aiohttp.client_exceptions.ClientConnectorError: Cannot connect to host 10.0.3.8:15000 ssl:default [Connect "
        "call failed ('10.0.3.8', 15000)]"),
    log("an engine that refuses connections, httpx", "ENG05",
        _raised("httpx.ConnectError: All connection attempts failed", "furlong/inference/sglang/client.py:info")),
    log("a prompt beyond the engine's context", "DATA04 TOOL02",
        _engine("ValueError: The input (4200 tokens) is longer than the model's context length (4096 tokens)."),
        remedy="--rollout-max-"),
)  # fmt: skip

NETWORK = (
    log("clients that do not join", "SYNC01",
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined."),
    log("a communicator that is not set up", "SYNC01",
        _raised("RuntimeError: [2] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d "
                "key-value store by key '0', but store->get('0') got error: wait timeout after 600000ms",
                "torch/distributed/distributed_c10d.py:broadcast")),
    log("a rendezvous that times out", "SYNC01",
        "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect "
        "to (10.0.3.7, 23456)."),
    log("a peer that resets the connection", "SYNC01 ENG03",
        _raised(NCCL_FAILED.format("remote", "ncclRemoteError: A call failed possibly due to a network error or a "
                                   "remote process exiting prematurely.", "socketProgressOpt: Call to recv from "
                                   "10.0.3.8<43412> failed : Connection reset by peer"),
                "torch/distributed/distributed_c10d.py:all_reduce")),
    log("no network interface", "SYNC01",
        "host:4821:4821 [0] bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found\n"
        + NCCL_FAILED.format("system", "ncclSystemError: System call (e.g. socket, malloc) or external library call "
                             "failed or device error.", "Bootstrap : no socket interface found"),
        remedy="NCCL_SOCKET_IFNAME"),
    log("shared memory of NCCL", "SYNC01 DISK01 MEM02",
        NCCL_FAILED.format("system", "ncclSystemError: System call (e.g. socket, malloc) or external library call "
                           "failed or device error.", "Error while creating shared memory segment /dev/shm/nccl-a1b2 "
                           "(size 9637888)"), remedy="/dev/shm"),
    log("a heartbeat that is missing", "SYNC01",
        "[rank3]:[F ProcessGroupNCCL.cpp:1557] [PG ID 0 PG GUID 0 Rank 3] ProcessGroupNCCL's watchdog got stuck for "
        "480 seconds without making progress in monitoring enqueued collectives. This typically indicates a NCCL/CUDA "
        "API (e.g., CudaEventDestroy) hang blocking the watchdog"),
    log("a port of c10d", "GPU03",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
        "port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"),
    log("a port of uvicorn", "GPU03",
        "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 30000): address already in use",
        remedy="port"),
    log("a port of ZeroMQ", "GPU03",
        _raised("zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:42001')",
                f"{SRT}managers/tokenizer_manager.py:__init__")),
    log("no cluster of Ray", "GPU05",
        "ConnectionError: Could not find any running Ray instance. Please specify the one to connect to by setting "
        "`--address` flag or `RAY_ADDRESS` environment variable."),
    log("Ray's control service is gone", "GPU05",
        "RuntimeError: Failed to connect to GCS at address 10.0.3.1:6379 within 5 seconds."),
    log("another version of Ray", "GPU05 ENV01",
        "RuntimeError: Version mismatch: The cluster was started with:\n    Ray: 2.9.3\n    Python: 3.10.13\nThis "
        "process on node 10.0.3.7 was started with:\n    Ray: 2.40.0\n    Python: 3.12.3"),
    log("resources that no node has", "GPU02 GPU01",
        "(autoscaler +1m2s) Error: No available node types can fulfill resource request {'GPU': 8.0, 'CPU': 8.0}. Add "
        "suitable node types to this cluster to resolve this issue."),
)  # fmt: skip

MACHINES = (
    log("no GPU that is visible", "GPU01 GPU04", _raised("RuntimeError: No CUDA GPUs are available",
                                                         "torch/cuda/__init__.py:_lazy_init")),
    log("one GPU for two ranks", "GPU01 GPU04",
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected : "
        "rank 1 and rank 0 both on CUDA device 1b000"),
    log("a GPU in exclusive mode", "GPU04",
        "torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
    log("a driver that is too old", "ENV01",
        "RuntimeError: The NVIDIA driver on your system is too old (found version 12020). Please update your GPU "
        "driver"),
    log("kernels of another GPU", "ENV01",
        _engine("RuntimeError: CUDA error: no kernel image is available for execution on the device")),
    log("a kernel package of another PyTorch", "ENV01",
        "ImportError: /usr/lib/python3.12/site-packages/flash_attn_2_cuda.so: undefined symbol: "
        "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_jb"),
    log("a full disk seen by safetensors", "DISK01",
        "safetensors_rust.SafetensorError: Error while serializing: IoError(Os { code: 28, kind: StorageFull, "
        'message: "No space left on device" })'),
    log("a full disk seen by torch.save", "DISK01",
        _raised("RuntimeError: [enforce fail at inline_container.cc:626] . unexpected pos 4608 vs 4502",
                "torch/serialization.py:save")),
    log("a full disk of Ray", "DISK01",
        "ray.exceptions.OutOfDiskError: Local disk is full\nThe object cannot be created because the local object "
        "store is full and the local disk's utilization is over capacity (95% by default)."),
    log("NaN in a bucket of Megatron", "NUM04",
        _rank(_raised("AssertionError: Rank 4: found NaN in local grad norm for bucket #3 in backward pass before "
                      "data-parallel communication collective. Device: 4, node: gpu-1",
                      f"{MCORE}distributed/param_and_grad_buffer.py:check_grads"))),
    log("NaN in Megatron's loss", "NUM04",
        _rank("RuntimeError: Rank 3, node gpu-1, device 3, iteration -1: Unexpected result nan (message='found NaN in "
              "local forward loss calculation')")),
    log("NaN in probabilities", "NUM04",
        _raised("RuntimeError: probability tensor contains either `inf`, `nan` or element < 0",
                f"{SRT}layers/sampler.py:forward")),
    log("NaN in an engine's logits", "NUM04", _engine("Detected errors during sampling! NaN in the logits.")),
)  # fmt: skip

FILES = (
    log("a cut safetensors file", "CKPT04",
        _engine("safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer")),
    log("a page of HTML as weights", "CKPT04",
        "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge"),
    log("a name that the hub does not know", "CKPT07",
        "OSError: Qwen/Qwen3-4b-x is not a local folder and is not a valid model identifier listed on "
        "'https://huggingface.co/models'"),
    log("a gated model", "CKPT07",
        "huggingface_hub.errors.GatedRepoError: 401 Client Error. Cannot access gated repo for url "
        "https://huggingface.co/meta-llama/Llama-3.1-8B/resolve/main/config.json."),
    log("an architecture of a newer transformers", "CKPT07 ENV01",
        _engine("ValueError: The checkpoint you are trying to load has model type `qwen4` but Transformers does not "
                "recognize this architecture.")),
    log("shapes of another model", "CKPT01 CKPT04",
        "RuntimeError: Error(s) in loading state_dict for Qwen3ForCausalLM:\n\tsize mismatch for "
        "model.embed_tokens.weight: copying a param with shape torch.Size([151936, 1024]) from checkpoint, the shape "
        "in current model is torch.Size([152064, 1024])."),
    log("shapes of another Megatron model", "CKPT01 CKPT04",
        _rank("megatron.core.dist_checkpointing.core.CheckpointingException: Global shape mismatch for loaded "
              "(torch.Size([151936, 2048])) and expected ((152064, 2048)) tensor for key "
              "embedding.word_embeddings.weight")),
    log("roles that a template refuses", "TPL01",
        "jinja2.exceptions.TemplateError: Conversation roles must alternate user/assistant/user/assistant/..."),
    log("a tokenizer without a template", "TPL01",
        "ValueError: Cannot use chat template functions because tokenizer.chat_template is not set and no template "
        "argument was passed!"),
)  # fmt: skip

LATER = (
    log("a connection of NCCL that times out", "SYNC01",
        NCCL_FAILED.format("system", "ncclSystemError: System call (e.g. socket, malloc) or external library call "
                           "failed or device error.", "socketStartConnect: Connect to 10.0.3.9<37621> failed : "
                           "Connection timed out")),
    log("a child that a signal ended", "ENG03 KILL01 MEM02",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\ntrain.py FAILED\n  rank      : 3 "
        "(local_rank: 3)\n  exitcode  : -9 (pid: 4312)\n  traceback : Signal 9 (SIGKILL) received by PID 4312"),
    log("cuBLAS that does not start", "MEM02",
        _raised("RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
                "torch/nn/modules/linear.py:forward")),
    log("a kernel that is too large for the GPU", "ENV01",
        _engine(_raised("triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456, "
                        "Hardware limit: 101376. Reducing block sizes or `num_stages` may help.",
                        f"{SRT}layers/attention/triton_ops/extend_attention.py:extend"))),
    log("a share too small for the cache, older words", "MEM02",
        _engine("RuntimeError: Not enough memory. Please try increasing --mem-fraction-static."),
        remedy="raise --sglang-mem-fraction-static"),
    log("a compiler error that wraps JSON", "ENG02",
        "torch._dynamo.exc.InternalTorchDynamoError: JSONDecodeError: Unterminated string starting at: line 1"),
    log("a worker of Ray that crashed", "ENG03",
        "ray.exceptions.WorkerCrashedError: The worker died unexpectedly while executing this task. Check "
        "python-core-worker-*.log files for more information."),
    log("a node that died", "ENG03",
        "ray.exceptions.NodeDiedError: Task was killed due to the node dying."),
    log("a full /dev/shm", "MEM02",
        _raised("OSError: [Errno 28] No space left on device: '/dev/shm/torch_4821_1'", "torch/storage.py:share")),
    log("a connection that an engine resets", "ENG05 ENG03",
        "requests.exceptions.ConnectionError: ('Connection aborted.', ConnectionResetError(104, 'Connection reset by "
        "peer'))"),
    log("a tokenizer that transformers cannot load", "CKPT07",
        "OSError: Can't load tokenizer for '/models/qwen'. If you were trying to load it from "
        "'https://huggingface.co/models', make sure you don't have a local directory with the same name."),
    log("no weights", "CKPT07 CKPT04",
        "OSError: Error no file named pytorch_model.bin, model.safetensors, tf_model.h5 found in directory /models/x."),
    log("a shard that is missing", "CKPT04",
        _engine('FileNotFoundError: No such file or directory: "/models/x/model-00004-of-00008.safetensors"')),
    log("an allocation of the runtime", "MEM02", "CUDA error: cudaErrorMemoryAllocation: out of memory"),
    log("a GPU of AMD", "MEM02", _raised("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB.",
                                         "furlong/training/worker.py:forward_backward")),
    log("a misaligned address", "ENG01",
        _engine(_raised("RuntimeError: CUDA error: misaligned address", f"{SRT}layers/attention/flash.py:forward"))),
    log("a port of IPv6", "GPU03",
        "[W socket.cpp:464] [c10d] The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in "
        "use)."),
    log("Ray's control service, gRPC's words", "GPU05",
        "(raylet) gcs_rpc_client.h:151: Failed to connect to GCS server: failed to connect to all addresses; last "
        "error: UNKNOWN: ipv4:10.0.3.1:6379: Failed to connect to remote host: Connection refused"),
    log("heads that do not divide", "CFG05",
        _engine("AssertionError: Total number of attention heads (28) must be divisible by tensor parallel size (8).")),
    log("a crash of C++", "ENG03", _engine("!!!!!!! Segfault encountered !!!!!!!\n  File \"<unknown>\", line 0, in "
                                          "c10::cuda::CUDACachingAllocator")),
)  # fmt: skip

CASES: tuple[Case, ...] = (*MEMORY, *ENGINES, *NETWORK, *MACHINES, *FILES, *LATER)
