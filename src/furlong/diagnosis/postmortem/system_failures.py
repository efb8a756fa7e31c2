"""General signatures of what the system refused: memory, network, files, limits, GPUs, and the scheduler."""

from __future__ import annotations

from furlong.core.transports import NCCL_REMEDY
from furlong.diagnosis.postmortem.log_text import LESS_HOST_MEMORY, Signature, general

SCHEDULER_RESUME = "resume with --load and the folder of --save; a smaller --save-interval loses fewer steps"
SHARED_MEMORY_REMEDY = (
    "start the container with --shm-size=16g or --ipc=host, or remount it: `mount -o remount,size=16g /dev/shm`"
)

# Searched before the signatures of engines that do not answer, whose words they contain.
NETWORK: tuple[Signature, ...] = (
    general(
        "NET01",
        r"[^\n]*(ProxyError|[Tt]unnel connection failed|connect to proxy|Proxy Authentication Required|"
        r"HTTP code \d+ from proxy|[Pp]roxy (server )?(refused|returned|responded|error))[^\n]*",
        "a proxy refused a connection",
        "exclude the machines of the run from the proxy: NO_PROXY=localhost,127.0.0.1,ADDRESSES; for servers outside, "
        "set https_proxy to a proxy that allows them",
        "http_proxy or https_proxy is set, so that requests to engines of the run go to the proxy, too; or the proxy "
        "does not allow the address.",
    ),
    general(
        "NET01",
        r"[^\n]*(gaierror|[Nn]ame or service not known|[Nn]ame[ _]?[Rr]esolution|[Ff]ailed to resolve|"
        r"[Cc](ould|an)( ?not|n't) resolve|nodename nor servname|EAI_\w+|no such host|No address associated|"
        r"DNS (lookup|resolution|query|server)|[Uu]nknown ?[Hh]ost)[^\n]*",
        "a host name cannot be resolved",
        "check the name and the DNS servers on that machine (`getent hosts NAME`); without a network to the outside, "
        "download models beforehand, pass local folders, and set HF_HUB_OFFLINE=1",
        "The name is wrong, or the machine (often a compute node) has no DNS or no network to the outside.",
    ),
    general(
        "NET01",
        r"[^\n]*(CERTIFICATE_VERIFY_FAILED|certificate (verify|has expired|is not (yet )?valid|signed by unknown)|"
        r"SSL\w*Error|[Ss]elf[- ]signed certificate|TLS handshake|x509:|unable to get local issuer)[^\n]*",
        "a TLS certificate is not accepted",
        "set SSL_CERT_FILE and REQUESTS_CA_BUNDLE to the certificates of the network's proxy; check the clock (`date`)",
        "A proxy of the network re-signs connections with its own certificate, or the machine's clock is wrong.",
    ),
)

SERVERS: tuple[Signature, ...] = (
    general(
        "NET01",
        r"[^\n]*(\b429\b[^\n]*([Cc]lient|[Tt]oo|[Rr]ate|for url)|Too Many Requests|[Rr]ate[ -]?[Ll]imit)[^\n]*",
        "a server limits the number of requests",
        "download once (`hf download NAME --local-dir DIR`) and pass the local folder on every machine; HF_TOKEN "
        "raises the hub's limit",
        "Many processes ask the same server at once, or without credentials.",
    ),
    general(
        "NET01",
        r"[^\n]*(\b(status|code|HTTP)\b[^\n]{0,12}\b5\d\d\b|\b50[0234]\b (Server|Bad|Service|Gateway|Internal)|"
        r"Service (Temporarily )?Unavailable|Bad Gateway|"
        r"Gateway Time-?out)[^\n]*",
        "a server fails",
        "look at the log of that server, and try again later if it is not yours",
        "The server, or a proxy before it, is overloaded or broken.",
    ),
    general(
        "NET01",
        r"[^\n]*([Cc]redentials?\b|\(publickey|[Aa]uth(entication|orization) ?([Ff]ail|requir|[Ee]rror)|"
        r"([Ii]ncorrect|[Ii]nvalid) API key|"
        r"api[_ ]key[^\n]{0,40}(not configured|invalid|missing|required)|[Ii]nvalid (API key|token|username)|"
        r"\b(401|403)\b[^\n]*(Client Error|Unauthorized|Forbidden|>)|Unauthorized|Forbidden for url|"
        r"[Yy]ou (must|need to) be (authenticated|logged in)|[Gg]ated ?[Rr]epo|[Nn]ot logged in|"
        r"not have permission to access the requested)[^\n]*",
        "a server does not accept the credentials",
        "for the hub, set HF_TOKEN (`hf auth login`) of an account that may access the model, or download it to a "
        "local folder; for W&B, set WANDB_API_KEY (`wandb login`) and check --wandb-team and --wandb-project, or use "
        "--wandb-mode offline; for SSH and buckets, make the key or the credentials available on that machine",
        "The token or key is missing on that machine, has expired, or its account has no permission.",
    ),
    general(
        "NET01",
        r"[^\n]*wandb[^\n]*(CommError|[Tt]imed? ?out|[Uu]nreachable|[Cc]onnection|[Nn]etwork error)[^\n]*|"
        r"[^\n]*CommError[^\n]*",
        "W&B does not answer",
        "use --wandb-mode offline and upload later with `wandb sync`, or --wandb-mode disabled",
        "The machine has no network to the outside, or W&B is down.",
    ),
    general(
        "NET01",
        r"[^\n]*(Network is (unreachable|down)|No route to host|Host is (down|unreachable)|ENETUNREACH|EHOSTUNREACH|"
        r"ETIMEDOUT|ConnectTimeout|[Cc]onnect(ion)?( attempt)? (to \S+ )?(has )?timed? ?out|[Cc]onnect timeout|"
        r"[Tt]imed? ?out (while |when )?(trying to )?connect\w*|\[Errno (101|110|113)\](?![^\n]*: '/)|"
        r"os error (101|110|113)\b)[^\n]*",
        "an address cannot be reached",
        "check the address from that machine (`ip route get ADDRESS`, `curl -v URL`) and the firewall; with several "
        "networks, use addresses of the one that all machines share (NCCL_SOCKET_IFNAME, "
        "GLOO_SOCKET_IFNAME)",
        "The host is down or its address belongs to another network, or a firewall drops the packets.",
    ),
)

MEMORY_KINDS: tuple[Signature, ...] = (
    general(
        "MEM02",
        r"[^\n]*(CachingHostAllocator|cudaHostAlloc|cudaHostRegister|[Pp]inned[ _]memory|pin_memory[^\n]*memory|"
        r"HOST_ALLOCATION_FAILED)[^\n]*",
        "out of pinned host memory",
        f"{LESS_HOST_MEMORY}; raise `ulimit -l` (in containers --ulimit memlock=-1)",
        "Host memory is used up, or the limit of locked memory is too small.",
    ),
    general(
        "MEM02",
        r"[^\n]*([Oo]bject ?[Ss]tore ?(is )?[Ff]ull|ObjectStoreFullError)[^\n]*",
        "Ray's object store is full",
        "start Ray with a larger --object-store-memory and a /dev/shm of that size (--shm-size of the container)",
        "Objects that are passed between processes do not fit into the memory that Ray reserved for them.",
    ),
    general(
        "MEM02",
        r"[^\n]*([Bb]us error|SIGBUS|exit(ed with)? (code|status):? 135|/dev/shm|insufficient shared memory|"
        r"unable to (write|open|mmap|allocate|resize)[^\n]*(shared memory|</torch_|shm)|shm_open|"
        r"shared memory[^\n]*([Ff]ail|[Ff]ull|[Uu]nable|insufficient|No space))[^\n]*",
        "/dev/shm is too small, or a mapped file was cut off",
        SHARED_MEMORY_REMEDY + "; if it is large enough (`df -h /dev/shm`), check that no file that the run reads was "
        "cut off or replaced meanwhile (`furlong check DIR`)",
        "Processes exchange data in /dev/shm, of which Docker gives a container 64 MiB. A mapped file that becomes "
        "shorter ends its readers with the same signal.",
    ),
    general(
        "MEM02",
        r"[^\n]*((CUDA|cuda|cuDNN|CUDNN|[cC][uU](BLAS|blas|FFT|fft)|HIP|hip|GPU|NCCL|nccl|VRAM|HBM|device)[^\n]*"
        r"(out of memory|OOM\b|ALLOC\w*FAILED|ALLOCATION_FAILED|(insufficient|not enough)( \w+)? memory|"
        r"[Ff]ailed to allocate|RESOURCE_EXHAUSTED)|CUDA_ERROR_OUT_OF_MEMORY)[^\n]*",
        "out of GPU memory",
        "lower --max-tokens-per-gpu (with --use-dynamic-batch-size) or --micro-batch-size, use --recompute-activations "
        "or --offload-optimizer-states; of an engine, lower --sglang-mem-fraction-static; `furlong plan` with the same "
        "flags lists what needs memory",
        "The process or another one on the same GPU (`nvidia-smi` lists them) had used up its memory.",
    ),
    general(
        "MEM02",
        r"[^\n]*([Oo]ut of memory: Kill\w* process|oom[-_]kill|memory pressure|\bOOM(Killed| [Kk]ill)|exit(ed with)? "
        r"(code|status):? 137|SIGKILL|[Kk]illed by signal: ?(Killed|9)|signal 9\b|\d+ Killed\b|"
        r"memory (limit|cgroup)[^\n]*(exceed|out of)|exceeded[^\n]*memory limit)[^\n]*",
        "a process was killed, usually because host memory was used up",
        f"look for `Out of memory: Killed process` in `dmesg` and for a message of the scheduler; {LESS_HOST_MEMORY}",
        "The kernel, the container or the scheduler ends a process when host memory is used up. A scheduler or a "
        "person ends one with the same signal.",
    ),
    general(
        "MEM02",
        r"[^\n]*(std::bad_alloc|MemoryError|[Uu]nable to allocate|(could|can) ?not allocate|can't allocate|"
        r"[Ff]ailed to (m?alloc|allocate)|ENOMEM|\[Errno 12\]|os error 12\b|[Ii]nsufficient (system |host )?memory|"
        r"[Oo]ut of memory|mmap failed|Cannot allocate)[^\n]*",
        "out of host memory",
        LESS_HOST_MEMORY,
        "The process needed more than the machine, its container or `ulimit -v` allows.",
    ),
)

LIMITS: tuple[Signature, ...] = (
    general(
        "LIMIT01",
        r"[^\n]*(Too many open files|\bE[MN]FILE\b|\[Errno 2[34]\]|os error 24\b|RLIMIT_NOFILE|inotify)[^\n]*",
        "too many open files",
        "raise the limit before the start: `ulimit -n 65536` (in containers --ulimit nofile=65536; for inotify `sysctl "
        "fs.inotify.max_user_watches`)",
        "The process may open no more files and sockets (`ulimit -n`), or something does not close them.",
    ),
    general(
        "LIMIT01",
        r"[^\n]*(ibv_\w+[^\n]*(fail|error)|RLIMIT_MEMLOCK|memlock|locked memory)[^\n]*",
        "InfiniBand may not lock memory",
        "raise the limit before the start: `ulimit -l unlimited` (in containers --ulimit memlock=-1; of Slurm, "
        "PropagateResourceLimits)",
        "The limit of locked memory (`ulimit -l`) is too small, or host memory is used up.",
    ),
    general(
        "LIMIT01",
        r"[^\n]*([Cc]an(no|')t (start new thread|fork|create (new )?thread)|Resource temporarily unavailable|EAGAIN|"
        r"pthread_create|[Tt]hread creation failed|[Uu]nable to (create|start)( \w+)* thread|RLIMIT_NPROC|"
        r"fork(ing)?:? [^\n]*(fail|retry|unavailable)|pids?[._-](max|limit)|\[Errno 11\]|os error 11\b|"
        r"failed to (create|spawn) thread)[^\n]*",
        "no further process or thread can be started",
        "raise the limit before the start (`ulimit -u`; in containers --pids-limit), use fewer --num-reward-workers, "
        "and set OMP_NUM_THREADS=1 and OPENBLAS_NUM_THREADS=1",
        "The user or the container has used up its processes and threads; libraries start a thread per core in every "
        "process.",
    ),
    general(
        "LIMIT01",
        r"[^\n]*(RecursionError|maximum recursion depth|[Ss]tack overflow)[^\n]*",
        "the stack is used up",
        "look at the function that the traceback repeats; data nested thousands of levels deep has the same effect",
        "A function calls itself without end, or processes data that is nested too deeply.",
    ),
)

DISKS: tuple[Signature, ...] = (
    general(
        "GPU03",
        r"[^\n]*((Cannot|can't|[Ff]ailed to) (assign requested address|bind)|EADDRNOTAVAIL|\[Errno 99\]|"
        r"bind(ing)?\b[^\n]*(denied|not permitted|fail|error)|[Pp]ort \d+ [^\n]*(in use|taken|occupied|"
        r"unavailable))[^\n]*",
        "a server cannot listen at its address",
        "use an address of this machine (`ip -brief address`), and a free port above 1023",
        "The address belongs to another machine, or the port is taken or reserved for root (below 1024).",
    ),
    general(
        "DISK01",
        r"[^\n]*([Qq]uota[^\n]*exceeded|exceeded[^\n]*quota|over quota|EDQUOT|\[Errno 122\]|os error 122\b)[^\n]*",
        "a disk quota is used up",
        "delete files of yours there (`quota -s` lists the limits; the cache of the hub is HF_HOME), use --save on "
        "another disk, or --keep-checkpoints",
        "Your account or project may store no more bytes or files on this disk, which itself has space.",
    ),
    general(
        "DISK01",
        r"[^\n]*(No space left|ENOSPC|[Dd]isk (is )?full|StorageFull|ephemeral-storage|\[Errno 28\]|os error 28\b|"
        r"not enough (free )?"
        r"(disk )?space|[Ii]nsufficient (disk )?space|unexpected pos \d+|inline_container)[^\n]*",
        "the disk is full",
    ),
    general(
        "DISK01",
        r"[^\n]*([Rr]ead-only file ?system|EROFS|\[Errno 30\]|os error 30\b)[^\n]*",
        "a folder cannot be written",
        "use folders on a disk that is mounted for writing: --save, and HF_HOME, TRITON_CACHE_DIR and TMPDIR for "
        "caches",
        "Its disk is mounted read-only, or the kernel made it read-only after errors (`dmesg`).",
    ),
)

FILE_SYSTEMS: tuple[Signature, ...] = (
    general(
        "FILE01",
        r"[^\n]*(Stale (NFS )?file handle|Transport endpoint is not connected|Remote I/O error|ESTALE|ENOTCONN|"
        r"Input/output error|\bEIO\b|\[Errno (5|95|107|108|110|112|116|121)\]|os error (5|107|116)\b|"
        r"Structure needs cleaning|"
        r"[Bb]ad file descriptor|[Oo]peration not supported|endpoint shutdown|Device or resource busy|"
        r"No such device|\[Errno 16\])[^\n]*",
        "a disk or network file system failed",
        "check the mount (`df`, `dmesg`), mount it again, or copy the files to a local disk; then resume with --load",
        "The server of a network file system restarted or replaced the file, or the disk is defective.",
    ),
    general(
        "FILE01",
        r"[^\n]*(No locks available|ENOLCK|\[Errno 37\]|\b[Ll]ock(ing|s)?\b[^\n]*(not supported|\bfail|unable)|"
        r"(could|can) ?not (acquire|obtain|lock)|\bis locked\b|[Uu]nable to (acquire|create|lock)[^\n]*lock)[^\n]*",
        "a file cannot be locked",
        "use a local disk or a file system with locks: --save, and HF_HOME for the cache of the hub",
        "The file system (often NFS without a lock server) does not support locks, or another process has the lock.",
    ),
    general(
        "FILE01",
        r"[^\n]*([Pp]ermission ?(Error|[Dd]enied)|Operation not permitted|EACCES|EPERM|\[Errno (1|13)\]|"
        r"os error (1|13)\)|[Aa]ccess (is )?denied)[^\n]*",
        "a file or folder may not be used",
        "check owner and mode (`ls -ld PATH`, `id`); use folders that the account of the run may write: --save, and "
        "HF_HOME, TRITON_CACHE_DIR and TMPDIR for caches",
        "It belongs to another account, or was created by root in a container.",
    ),
)

PATHS: tuple[Signature, ...] = (
    general(
        "FILE01",
        r"[^\n]*([Ff]ile ?name too long|ENAMETOOLONG|\[Errno 36\])[^\n]*",
        "a file name is too long",
        "use a shorter path (a name has at most 255 bytes; the path of a socket 107)",
        "A name was built from a long text, or the folder is nested deeply.",
    ),
    general(
        "FILE01",
        r"[^\n]*(FileNotFoundError|No such file or directory|ENOENT|\[Errno 2\]|os error 2\b|NotADirectoryError|"
        r"Not a directory|IsADirectoryError|Is a directory|FileExistsError|File exists|[Dd]irectory not empty|"
        r"[Ff]ile \S+ (does not exist|not found)|[Pp]ath \S+ does not exist)[^\n]*",
        "a file is missing, or there is another one in its place",
        "check the path on the machine of that process (`ls -l`): every machine needs it, so put it on a shared disk, "
        "and use absolute paths",
        "It does not exist on this machine, the path is relative to another working directory, or something else "
        "removed or created it.",
    ),
)

MACHINES: tuple[Signature, ...] = (
    general(
        "GPU01",
        r"[^\n]*(could not select device driver|nvidia-container-(cli|runtime)|capabilities: \[\[gpu|"
        r"[Nn]o (NVIDIA|CUDA)? ?(GPUs?|devices?)( \w+)* (found|detected|available|visible)|no NVIDIA driver|"
        r"cuda:\d+ is invalid)[^\n]*",
        "a process or a container has no access to the GPUs",
        "install the NVIDIA container toolkit and start the container with --gpus all; check `nvidia-smi` and "
        "CUDA_VISIBLE_DEVICES there",
        "The container was started without GPUs, CUDA_VISIBLE_DEVICES hides them, or the machine has none.",
    ),
    general(
        "SYNC01",
        r"[^\n]*(peer access|P2P|peer-to-peer|GPUDirect|nvidia[-_]peermem)[^\n]*",
        "GPUs cannot access each other's memory",
        "set NCCL_P2P_DISABLE=1 (--train-env-vars), so that NCCL copies through host memory; `nvidia-smi topo -p2p r` "
        "prints which GPUs can",
        "The GPUs are not connected in a way that permits it, or a virtual machine (IOMMU) forbids it.",
    ),
    general(
        "KILL01",
        r"[^\n]*(DUE TO (PREEMPTION|TIME LIMIT|NODE[ _]FAIL\w*|JOB REQUEUE)|CANCELLED AT|[Pp]re-?empt(ed|ion|ing)\b|"
        r"[Ss]pot (instance|VM|node)|[Ii]nterruption notice|[Ee]victed\b|[Ee]viction|scancel|[Nn]ode failure|"
        r"[Ww]all ?(time|clock)[^\n]*exceed|walltime|TERM_[A-Z]+:|job killed|[Nn]ode shutdown|exit(ed with)? (code|"
        r"status):? 143|[Pp]od was (terminated|deleted)|[Tt]ime limit (reached|exceeded)|"
        r"DeadlineExceeded|system (is|will be) (going|shut))[^\n]*",
        "the scheduler or the cloud ended the job",
        f"{SCHEDULER_RESUME}; request more time (Slurm: --time) or a partition that does not preempt (--requeue starts "
        "the job again)",
        "The job was preempted, its time was over, or a machine failed; the message says which.",
    ),
    general(
        "ENV01",
        r"[^\n]*(Driver/library version mismatch|[Ee]rror 80[34]\b|unsupported display driver|forward compatibility|"
        r"driver[^\n]*(too old|insufficient|mismatch|not compatible)|communicate with the NVIDIA driver|"
        r"libnvidia-ml|PTX was compiled with an unsupported|"
        r"CUDA_ERROR_(UNSUPPORTED_PTX|COMPAT|SYSTEM_DRIVER)\w*)[^\n]*",
        "the GPU's driver does not fit",
        "restart the machine (or reload the driver) after an update of the driver; in a container, remove "
        "/usr/local/cuda/compat from LD_LIBRARY_PATH; otherwise update the driver, or install PyTorch for the CUDA "
        "version that `nvidia-smi` prints",
        "The libraries of the driver are of another version than its kernel module: it was updated without a restart, "
        "or the container brings its own; or the driver is older than CUDA.",
    ),
    general(
        "GPU06",
        r"[^\n]*(\bXid\b|fallen off the bus|[Uu]ncorrectable|ECC error|NVLink[^\n]*([Ee]rror|fail)|"
        r"GPU (is lost|requires (a )?reset)|[Uu]nable to determine the device handle|CUDA(_ERROR)?_?UNKNOWN|"
        r"CUDA (unknown error|error: unknown error|initialization error)|system not (yet )?initialized|[Ee]rror 802\b|"
        r"[Ff]abric ?[Mm]anager|NVML[^\n]*(fail|[Ee]rror|Unknown)|hardware error|device kernel image is invalid)[^\n]*",
        "a GPU or its driver failed",
        "look at `nvidia-smi -q` and for `Xid` in `dmesg` on that machine; exclude it (Slurm: --exclude), restart it, "
        "and resume with --load",
        "The hardware is defective or too hot, the driver needs a restart, or its services (the fabric manager of "
        "machines with NVSwitch) do not run.",
    ),
    general(
        "GPU06",
        r"(?![^\n]*device-side assert)[^\n]*(CUDA (driver )?error: |(CUBLAS|CUDNN|CUSPARSE|CUFFT|CURAND|"
        r"NPP)_STATUS_\w+|cudaError\w+|"
        r"CUDA_ERROR_\w+|"
        r"Triton Error|HIP error: )[^\n]*",
        "an operation on a GPU failed",
        "repeat it with CUDA_LAUNCH_BLOCKING=1 (--train-env-vars), which names the operation; if it fails on one "
        "machine only, exclude that and look for `Xid` in `dmesg`; if on all, use other kernels "
        "(--attention-backend, --sglang-attention-backend) and run `furlong env`",
        "A kernel got sizes that it does not support or was built for another GPU; or the GPU or its driver fails.",
    ),
    general(
        "ENG03",
        r"(?![^\n]*[Ii]llegal)[^\n]*(malloc\(|double free|free\(\):|corrupted (size|top|double)|stack smashing|"
        r"core dumped|SIG(SEGV|ABRT)|"
        r"[Ss]egmentation fault|exit(ed with)? (code|status):? 13[49])[^\n]*",
        "a process crashed in compiled code",
        "run it with PYTHONFAULTHANDLER=1, which names the function; install the package of that function again for "
        "this PyTorch (`furlong env`); if it crashes in different places, test the machine's memory",
        "A compiled library has a bug or was built for other versions; rarely, memory of the machine is defective.",
    ),
    general(
        "ENG03",
        r"[^\n]*(ActorUnavailableError|failed heartbeats|[Mm]arked (as )?dead|[Nn]ode \S* ?(is |has )?(dead|down|died|"
        r"lost|unreachable|failed)|NodeLost|owner's node has crashed|PlacementGroupRemoved|lost communication with|"
        r"raylet[^\n]*(died|dead|lost))[^\n]*",
        "a machine left the cluster",
        "check that it runs (`ray status`), start Ray on it again, and resume with --load",
        "It was shut down or restarted, its Ray processes were ended, or the network to it is down.",
    ),
    general(
        "SYNC01",
        r"[^\n]*(mismatch between collectives|CollectiveFingerPrint|ncclInvalid(Usage|Argument)|"
        r"NCCL[^\n]*version mismatch|[Ii]ncompatible NCCL)[^\n]*",
        "ranks do not call the same collective",
        "compare the versions on all machines with `furlong env` (NCCL, PyTorch) and the flags and data of all ranks; "
        "NCCL_DEBUG=INFO prints what each rank calls",
        "The ranks run different versions of NCCL or of the code, or a hook of yours communicates on some ranks only.",
    ),
    general(
        "SYNC01",
        r"[^\n]*(transport/net_ib|NET/IB|[Ii]nfini[Bb]and|\bmlx5_|\bib_\w+|RoCE|vendor err|UCX +ERROR)[^\n]*",
        "InfiniBand reports an error",
        f"check `ibstat` and the cables of both machines, set NCCL_IB_HCA to the adapters that work, or "
        f"NCCL_IB_DISABLE=1"
        f" to use TCP; {NCCL_REMEDY}",
        "A link is down or configured differently, or the process at the other end ended (its log then ends, too).",
    ),
    general(
        "SYNC01",
        r"[^\n]*(gloo|TCPStore|c10d|ProcessGroup|[Dd]istStore|[Dd]istNetwork|DistBackend|NCCL|nccl|[Cc]ollective|"
        r"[Rr]endezvous)[^\n]*(reset by peer|[Cc]losed|[Bb]roken pipe|0 bytes|refused|shut ?down|[Ff]ailed to (recv|"
        r"send|"
        r"connect)|[Aa]borted|remote process)[^\n]*",
        "the other end of a collective is gone",
        "read the log of the rank at that address, of rank 0 if none is named: if it ends with an exception, that is "
        f"the cause; if the process is alive, {NCCL_REMEDY}",
        "The other process ended (its log then ends, too), or the network dropped the connection (it is alive).",
    ),
    general(
        "SYNC01",
        r"[^\n]*(gloo|TCPStore|c10d|ProcessGroup|[Dd]istStore|[Dd]istNetwork|DistBackend|NCCL|nccl|[Cc]ollective|"
        r"[Rr]endezvous|[Bb]arrier|\bRank\b)[^\n]*([Tt]imed? ?out|timeout|failed to pass)[^\n]*",
        "a collective timed out",
        "see which rank did not arrive (`furlong doctor --run`, the logs of the other ranks); raise "
        f"--distributed-timeout-minutes if a part needs longer; {NCCL_REMEDY}",
        "A rank does not take part, or the network between them is misconfigured or slow.",
    ),
)

CONNECTIONS: tuple[Signature, ...] = (
    general(
        "ENG05",
        r"[^\n]*([Cc]onnection (was )?(refused|reset|aborted|closed)|ECONN(REFUSED|RESET|ABORTED)|[Bb]roken ?[Pp]ipe|"
        r"EPIPE|RemoteDisconnected|RemoteProtocolError|ServerDisconnected|ReadTimeout|ReadError|[Pp]eer closed|"
        r"\[Errno (32|103|104|111)\]|os error (32|104|111)\b)[^\n]*",
        "a server does not answer, or closed the connection",
        "read the end of the log of the server at that address; if it runs, check the address, the port and the "
        "firewall",
        "It is still starting, or it died; or the address is that of something else.",
    ),
    general(
        "SYNC01",
        r"[^\n]*([Tt]imed? ?out|Time(out|d ?out)\w*Error|DEADLINE_EXCEEDED)[^\n]*",
        "something did not answer in time",
        "see what it waited for (the frames above it) and read the log of that process; `furlong doctor --run` of a "
        f"run in progress prints who waits for whom; {NCCL_REMEDY}",
        "The other side is slow, waits itself, or has ended; or the network between them drops packets.",
    ),
)

OTHER_ERRORS: tuple[Signature, ...] = (
    general(
        "FILE01",
        r"[^\n]*\[Errno \d+\][^\n]*",
        "the system refused an operation",
        "look at the file or address that the line names: its disk and mount (`df`), owner and mode (`ls -ld`), and "
        "`dmesg` of that machine",
        "The text after the number is the reason that the system gives.",
    ),
)
