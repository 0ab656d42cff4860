"""What is changed in the sources of Horovod 0.28.1 before it is built: for speed, and faults.

Each is a file, a text that it has once, and what comes instead. HEADERS are put beside Horovod's
own of Gloo. The figures are in benchmarks/NOTES.md. PATCH goes into the names of wheels: it counts
up with each change.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from cluster.environment import InstallError

PATCH = "p97"
HEADERS = [
    Path(__file__).with_name(name) for name in ("rounds.h", "shared_memory.h", "sixteen_bits.h")
]
NOTIFY = "  added_.notify_one();\n"
QUEUE, GLOO = "horovod/common/tensor_queue", "third_party/gloo/gloo"
CONTROLLER = "horovod/common/gloo/gloo_controller.cc"
CONTEXT = "horovod/common/gloo/gloo_context"
HANDLES = "horovod/torch/handle_manager.cc"
OPERATIONS = "horovod/common/ops/gloo_operations.cc"
STORE, MPI_OPS = "horovod/common/gloo/http_store", "horovod/torch/mpi_ops_v2.cc"
SEND = "sendRank, slot, inOffsetPerRank[sendRank], inLengthPerRank[sendRank]"
PATCHES = [
    # Horovod's library looked for others in the folder of its build first, which is in /tmp,
    # where anybody may make a folder of that name. It needs none: torch is imported first, and
    # has them all.
    ("CMakeLists.txt", "project(horovod CXX)\n",
     "project(horovod CXX)\nset(CMAKE_SKIP_RPATH ON)\n"),
    # Horovod opened libcuda.so, a name for compilers; drivers are installed as libcuda.so.1, and
    # some hosts and images have that alone.
    ("horovod/torch/cuda_util.cc", 'dlopen("libcuda.so",', 'dlopen("libcuda.so.1",'),
    # In newer versions of torch, a thread that lets go of a tensor which Python has too takes
    # Python's lock for it. Horovod's thread did so for each reduction, each time as a thread that
    # was new to Python. A process that forked at that moment, as for the workers of a DataLoader,
    # had a child that never began, with Python before 3.10.15, 3.11.10 and 3.12
    # (python/cpython#112275). Now Python knows the thread from its first tensor on.
    (HANDLES, '#include "handle_manager.h"\n', """\
#include <Python.h>

#include "handle_manager.h"

#include <chrono>
#include <condition_variable>
"""),
    (HANDLES,
     "void HandleManager::MarkDone(int handle, const Status& status) {\n", """\
void HandleManager::MarkDone(int handle, const Status& status) {
  static thread_local bool known = PyGILState_GetThisThreadState() != nullptr;
  if (!known) {
    PyGILState_Ensure();
    PyEval_SaveThread();
    known = true;
  }
"""),
    # To wait, Horovod asks without a pause whether an operation is done. Now one can sleep until
    # more are done than one knows of.
    (HANDLES, "int HandleManager::AllocateHandle() {\n", """\
static std::mutex done_mutex;
static std::condition_variable more_done;
static unsigned done = 0;

// How many operations are done: once they are other than those known, or after so long.
extern "C" unsigned horovod_operations_done(unsigned known, unsigned microseconds) {
  std::unique_lock<std::mutex> lock(done_mutex);
  more_done.wait_for(lock, std::chrono::microseconds(microseconds), [&] { return done != known; });
  return done;
}

int HandleManager::AllocateHandle() {
"""),
    (HANDLES, """\
  std::lock_guard<std::mutex> guard(mutex_);
  results_[handle] = std::make_shared<Status>(status);
""", """\
  {
    std::lock_guard<std::mutex> guard(mutex_);
    results_[handle] = std::make_shared<Status>(status);
  }
  {
    std::lock_guard<std::mutex> guard(done_mutex);
    done++;
  }
  more_done.notify_all();
"""),
    # Horovod's thread asks all ranks once a cycle (1 ms) what is ready, also where nothing is,
    # and so takes 5 % of a core from training. With HOROVOD_IDLE_TIME=ms in the environment it
    # sleeps for that long, or until this rank hands it something; without, all is as it was.
    (f"{QUEUE}.h", "#include <mutex>\n",
     "#include <chrono>\n#include <condition_variable>\n#include <mutex>\n"),
    (f"{QUEUE}.h", "protected:\n", """\
  // Returns when there are tensors to work on, or after so long.
  void WaitForTensors(std::chrono::microseconds most);

  // From now on, until FinalizeTensorQueue, it takes tensors.
  void Begin();

protected:
  std::condition_variable added_;
  bool ended_ = false;
"""),
    (f"{QUEUE}.cc", "Status TensorQueue::AddToTensorQueue(", """\
void TensorQueue::WaitForTensors(std::chrono::microseconds most) {
  std::unique_lock<std::mutex> lock(mutex_);
  added_.wait_for(lock, most, [this] {
    return !tensor_table_.empty() || !message_queue_.empty();
  });
}

void TensorQueue::Begin() {
  std::lock_guard<std::mutex> guard(mutex_);
  ended_ = false;
}

Status TensorQueue::AddToTensorQueue("""),
    (f"{QUEUE}.cc", "  message_queue_.push(std::move(message));\n  return",
     f"{NOTIFY}  message_queue_.push(std::move(message));\n  return"),
    (f"{QUEUE}.cc", "    message_queue_.push(std::move(messages[i]));\n",
     f"    message_queue_.push(std::move(messages[i]));\n{NOTIFY}"),
    ("horovod/common/operations.cc",
     "  state.last_cycle_start = std::chrono::steady_clock::now();\n\n  if", """\
  static const auto idle_time = std::chrono::milliseconds(
      std::getenv("HOROVOD_IDLE_TIME") ? std::atol(std::getenv("HOROVOD_IDLE_TIME")) : 0);
  // With several sets of processes, each cycle of one waits for the others'.
  if (idle_time.count() > 0 && !state.dynamic_process_sets &&
      state.process_set_table.Ids().size() == 1) {
    state.process_set_table.Get(0).tensor_queue.WaitForTensors(idle_time);
  }
  state.last_cycle_start = std::chrono::steady_clock::now();

  if"""),
    # At its end Horovod's thread tells who waits for tensors, and lets go of them, for which it
    # needs Python's lock. A program that was about to hand over another one had that lock, and
    # waited for others that the thread had: both waited forever. Or that tensor came just after,
    # and of its end nobody was told.
    (f"{QUEUE}.cc", """\
  std::lock_guard<std::mutex> guard(mutex_);
  for (auto& e : tensor_table_) {
    e.second.FinishWithCallback(status);
  }
  tensor_table_.clear();
  while (!message_queue_.empty()) {
    message_queue_.pop();
  }
""", """\
  decltype(tensor_table_) left;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    ended_ = true;
    left.swap(tensor_table_);
    while (!message_queue_.empty()) {
      message_queue_.pop();
    }
  }
  for (auto& e : left) {
    e.second.FinishWithCallback(status);
  }
"""),
    ("horovod/common/operations.cc", "  state.shut_down = true;\n", """\
  state.shut_down = true;
  for (auto id : state.process_set_table.Ids()) {
    state.process_set_table.Get(id).tensor_queue.FinalizeTensorQueue(SHUT_DOWN_ERROR);
  }
"""),
    (f"{QUEUE}.cc", "  if (tensor_table_.find(e.tensor_name)",
     "  if (ended_) {\n    return SHUT_DOWN_ERROR;\n  }\n"
     "  if (tensor_table_.find(e.tensor_name)"),
    (f"{QUEUE}.cc", "  for (std::size_t i = 0; i < entries.size(); ++i) {\n    if",
     "  if (ended_) {\n    return SHUT_DOWN_ERROR;\n  }\n"
     "  for (std::size_t i = 0; i < entries.size(); ++i) {\n    if"),
    ("horovod/common/process_set.cc", "  assert(controller != nullptr);\n  int size;\n",
     "  assert(controller != nullptr);\n  tensor_queue.Begin();\n  int size;\n"),
    ("horovod/common/process_set.cc", "  assert(global_gloo_context.ctx != nullptr);\n",
     "  assert(global_gloo_context.ctx != nullptr);\n  tensor_queue.Begin();\n"),
    # On a GPU Horovod ends an operation when the GPU has, for which the program waits, and hands
    # the GPU nothing meanwhile. HOROVOD_ENABLE_ASYNC_COMPLETION ends it when it is queued, and
    # has the stream wait for it in which backward still goes on. Now it is a stream of its own
    # that waits, and for that one the stream of who asks for the result. The other name for it,
    # HOROVOD_COMPLETE_IN_STREAM, says nothing to a Horovod that was built without this.
    ("horovod/common/operations.cc",
     "  SetBoolFromEnv(HOROVOD_ENABLE_ASYNC_COMPLETION, state.enable_async_completion,\n", """\
  SetBoolFromEnv("HOROVOD_COMPLETE_IN_STREAM", state.enable_async_completion, true);
  SetBoolFromEnv(HOROVOD_ENABLE_ASYNC_COMPLETION, state.enable_async_completion,
"""),
    (MPI_OPS, "#include <chrono>\n#include <memory>\n",
     "#include <chrono>\n#include <map>\n#include <memory>\n#include <mutex>\n"),
    (MPI_OPS, """\
gpuStream_t GetGPUStream(int device) {
  return c10::cuda::getCurrentCUDAStream(device);
}
""", """\
// Of a GPU: the stream that waits for all that was done there, and an event of it.
struct Done {
  c10::cuda::CUDAStream stream;
  cudaEvent_t event;
};
static std::mutex done_mutex;
static std::map<int, Done> done;

// For the thread that ends operations: what it does with a result comes behind the operation.
gpuStream_t GetGPUStream(int device) {
  std::lock_guard<std::mutex> guard(done_mutex);
  auto place = done.find(device);
  if (place == done.end()) {
    with_device here(device);
    cudaEvent_t event;
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    place = done.emplace(device, Done{c10::cuda::getStreamFromPool(false, device), event}).first;
  }
  c10::cuda::setCurrentCUDAStream(place->second.stream);
  return place->second.stream;
}

// For the thread that wants results: what it does with them comes behind all that was done.
void FollowInStream() {
  std::lock_guard<std::mutex> guard(done_mutex);
  for (auto& entry : done) {
    with_device here(entry.first);
    C10_CUDA_CHECK(cudaEventRecord(entry.second.event, entry.second.stream));
    C10_CUDA_CHECK(cudaStreamWaitEvent(
        c10::cuda::getCurrentCUDAStream(entry.first), entry.second.event, 0));
  }
}
"""),
    (MPI_OPS, """\
  auto status = handle_manager.ReleaseHandle(handle);
  ThrowIfError(*status);
""", """\
  auto status = handle_manager.ReleaseHandle(handle);
  ThrowIfError(*status);
#if HAVE_GPU
  if (status->event.event) {
    FollowInStream();
  }
#endif
"""),
    # With Gloo Horovod's list of ranks has no length, so that nobody is ever found to be missing:
    # who waits for a rank that does something else waits without a word. Now the ranks are named
    # after a minute (HOROVOD_STALL_CHECK_TIME_SECONDS), as they are with MPI.
    (CONTROLLER, "  global_ranks_.reserve(size_);\n",
     "  global_ranks_.resize(size_);\n"),
    # Before each operation ranks agree by an "and" of some bits, for which Gloo's ring takes
    # 2 (p - 1) messages, one after the other. Now the ranks of a host put them into memory that
    # they share, and those with the same local rank take log2(hosts) rounds: see rounds.h. Where
    # memory is not shared it is log2(p) rounds.
    (CONTROLLER, "void GlooController::CrossRankBitwiseAnd(", """\
static void Combine(const GlooContext& all, std::vector<long long>& bits, int count,
                    void (*combine)(void*, const void*, const void*, size_t)) {
  if (all.shared) {
    all.shared->Combine(bits.data(), count, combine);
  }
  all.rounds->Combine(bits.data(), count, combine);
}

void GlooController::CrossRankBitwiseAnd("""),
    (CONTROLLER, """\
  gloo::AllreduceOptions opts(gloo_context_.ctx);
  opts.setOutput(bitvector.data(), count);
  void (*func)(void*, const void*, const void*, size_t) = &BitAnd<long long>;
  opts.setReduceFunction(gloo::AllreduceOptions::Func(func));
  gloo::allreduce(opts);
""", "  Combine(gloo_context_, bitvector, count, &BitAnd<long long>);\n"),
    (CONTROLLER, """\
  gloo::AllreduceOptions opts(gloo_context_.ctx);
  opts.setOutput(bitvector.data(), count);
  void (*func)(void*, const void*, const void*, size_t) = &BitOr<long long>;
  opts.setReduceFunction(gloo::AllreduceOptions::Func(func));
  gloo::allreduce(opts);
""", "  Combine(gloo_context_, bitvector, count, &BitOr<long long>);\n"),
    # Gloo sends to a rank before it tells that rank that it may send. Both go through one
    # connection, in which the permission waits behind the data: one direction after the other,
    # half the speed.
    (f"{GLOO}/alltoallv.cc", f"    in->send(\n        {SEND});\n", ""),
    (f"{GLOO}/alltoallv.cc", "  for (int i = 1; i < worldSize; i++) {\n    in->waitSend", f"""\
  for (int i = 1; i < worldSize; i++) {{
    int sendRank = (myRank + i) % worldSize;
    in->send({SEND});
  }}
  for (int i = 1; i < worldSize; i++) {{
    in->waitSend"""),
    (f"{GLOO}/allgatherv.cc", """\
      out->send(sendRank, slot, byteOffsets[sendIndex], byteCounts[sendIndex]);
      out->recv(recvRank, slot, byteOffsets[recvIndex], byteCounts[recvIndex]);
""", """\
      out->recv(recvRank, slot, byteOffsets[recvIndex], byteCounts[recvIndex]);
      out->send(sendRank, slot, byteOffsets[sendIndex], byteCounts[sendIndex]);
"""),
    # At its start each rank asks the rendezvous for all others: for the host's name, which then
    # nothing reads, for the address until it is there, and once more for the address; one
    # question is enough.
    (f"{STORE}.h", "  int rank_;\n",
     "  int rank_;\n  std::string found_key_;\n  std::vector<char> found_;\n"),
    (f"{STORE}.cc", "  std::vector<char> result;\n  HTTP_GET(key", """\
  if (key == found_key_) {
    return found_;
  }
  std::vector<char> result;
  HTTP_GET(key"""),
    (f"{STORE}.cc", "      return false;\n    }\n  }\n", """\
      return false;
    }
    found_key_ = key;
    found_ = result;
  }
"""),
    (f"{GLOO}/rendezvous/context.cc",
     "  store.set(localKey, value);\n\n  for (int i = 0; i < size; i++) {\n",
     "  for (int i = rank; i < size; i++) {\n"),
    # What a rank puts there is p - 1 addresses, of which each other rank needs one. Our rendezvous
    # (cluster/rendezvous.py) picks them: one answer with all that a rank needs.
    (f"{GLOO}/rendezvous/context.cc", "  // Connect every pair\n", """\
  std::vector<char> addresses;  // of those that we connect to, in their order
  if (size > 1 && !store.get("picks").empty()) {
    const auto key = "to_" + std::to_string(rank) + "_of_" + std::to_string(size);
    store.wait({key}, getTimeout());
    addresses = store.get(key);
  }

  // Connect every pair
"""),
    (f"{GLOO}/rendezvous/context.cc",
     "    // Wait for address of other side of this pair to become available\n", """\
    if (!addresses.empty()) {
      const auto length = addresses.size() / (size - 1);
      const auto address = addresses.begin() + (i < rank ? i : i - 1) * length;
      transportContext->getPair(i)->connect(std::vector<char>(address, address + length));
      continue;
    }

    // Wait for address of other side of this pair to become available
"""),
    # Ranks connected to all others up to four times: for Horovod as a whole and for the process set
    # of all ranks, in each for all ranks, and for those of a host, or one of each host. Now once,
    # and for the latter two where they are not all ranks.
    (f"{CONTEXT}.cc", "  assert(global_context.IsEnabled());\n", """\
  assert(global_context.IsEnabled());
  if (registered_ranks.empty()) {
    global_ctx = ctx = global_context.ctx;
    local_ctx = global_context.local_ctx;
    cross_ctx = global_context.cross_ctx;
    shared = global_context.shared;
    rounds = global_context.rounds;
    return;
  }
"""),
    (f"{CONTEXT}.cc", "  local_ctx = Rendezvous(HOROVOD_GLOO_LOCAL_PREFIX + hostname_,",
     "  local_ctx = local_size == size ? ctx : Rendezvous(HOROVOD_GLOO_LOCAL_PREFIX + hostname_,"),
    (f"{CONTEXT}.cc",
     "  cross_ctx = Rendezvous(HOROVOD_GLOO_CROSS_PREFIX + std::to_string(local_rank),",
     "  cross_ctx = cross_size == size ? ctx : Rendezvous(\n"
     "      HOROVOD_GLOO_CROSS_PREFIX + std::to_string(local_rank),"),
    # Sends such as those of rounds.h gave a connection a buffer of their size for all that follows.
    # Linux fits it to the connection where nobody does.
    (f"{GLOO}/transport/tcp/pair.cc", """\
  // Try to size the send buffer such that the write below completes
  // synchronously and we don't need to finish the write later.
  size_t size = std::min(op.preamble.nbytes, kMaxSendBufferSize);
  if (sendBufferSize_ < size) {
    int rv;
    size_t optval = size;
    socklen_t optlen = sizeof(optval);
    rv = setsockopt(fd_, SOL_SOCKET, SO_SNDBUF, &optval, optlen);
    GLOO_ENFORCE_NE(rv, -1);
    rv = getsockopt(fd_, SOL_SOCKET, SO_SNDBUF, &optval, &optlen);
    GLOO_ENFORCE_NE(rv, -1);
    sendBufferSize_ = optval;
  }
""", ""),
    # Who waited for a message that was half there, or half sent, when the other rank ended was not
    # told, and waited for as long as Gloo waits.
    (f"{GLOO}/transport/tcp/pair.cc", """\
    if (op.buf != nullptr) {
      op.buf->signalException(ex);
    }
  }
""", """\
    if (op.buf != nullptr) {
      op.buf->signalException(ex);
    }
    NonOwningPtr<UnboundBuffer> sent(op.ubuf);
    if (sent) {
      sent->signalException(ex);
    }
  }
  NonOwningPtr<UnboundBuffer> received(rx_.ubuf);
  if (received) {
    received->signalException(ex);
  }
"""),
    # A connection that was closed stayed open where the rank has children, such as the workers of a
    # DataLoader, which have it too.
    (f"{GLOO}/transport/tcp/pair.cc",
     "      setsockopt(fd_, SOL_SOCKET, SO_LINGER, &sl, sizeof(sl));\n",
     "      setsockopt(fd_, SOL_SOCKET, SO_LINGER, &sl, sizeof(sl));\n"
     "      ::shutdown(fd_, SHUT_RDWR);\n"),
    # What had come whole from a rank was lost where that rank had ended before it was asked for.
    (f"{GLOO}/transport/tcp/buffer.cc", """\
      throwIfException();
      return recvCompletions_ > 0;
""", """\
      if (recvCompletions_ == 0) {
        throwIfException();
      }
      return recvCompletions_ > 0;
"""),
    # What several ranks of a host sum, and agree on: see shared_memory.h.
    (f"{CONTEXT}.h", '#include "../logging.h"\n',
     '#include "../logging.h"\n#include "rounds.h"\n#include "shared_memory.h"\n'),
    (f"{CONTEXT}.h", "  std::shared_ptr<gloo::Context> local_ctx = nullptr;\n",
     "  std::shared_ptr<gloo::Context> local_ctx = nullptr;\n"
     "  std::shared_ptr<SharedMemory> shared = nullptr;\n"
     "  std::shared_ptr<Rounds> rounds = nullptr;\n"),
    (f"{CONTEXT}.cc", '  LOG(DEBUG) << "Cross-node Gloo context initialized.";\n',
     '  LOG(DEBUG) << "Cross-node Gloo context initialized.";\n'
     "  shared = SharedMemory::Make(ctx, local_ctx, cross_ctx);\n"
     "  rounds = std::make_shared<Rounds>(shared ? cross_ctx : ctx);\n"),
    (f"{CONTEXT}.cc", """\
    LOG(DEBUG) << "Cross-node Gloo context for process set with hash "
               << process_set_hash << ".";
  }
""", """\
    LOG(DEBUG) << "Cross-node Gloo context for process set with hash "
               << process_set_hash << ".";
  }
  shared = SharedMemory::Make(ctx, local_ctx, cross_ctx);
  rounds = std::make_shared<Rounds>(shared ? cross_ctx : ctx);
"""),
    (f"{CONTEXT}.cc", "void GlooContext::Finalize() {\n",
     "void GlooContext::Finalize() {\n  shared.reset();\n  rounds.reset();\n"),
    (OPERATIONS, "  gloo::AllreduceOptions opts(gloo_context_->ctx);\n", """\
  if (reduce_op == ReduceOp::SUM && gloo_context_->shared) {
    gloo_context_->shared->Sum(static_cast<T*>(buffer_data), (size_t) num_elements);
    return;
  }
  gloo::AllreduceOptions opts(gloo_context_->ctx);
"""),
    # Sums in 16 bits, of tensors whose names ask for it: see sixteen_bits.h. That this Horovod has
    # them is said by a function.
    (OPERATIONS, '#include "../global_state.h"\n', """\
#include "../global_state.h"
#include "../gloo/sixteen_bits.h"

extern "C" int horovod_sums_in_16_bits() { return 1; }
"""),
    (OPERATIONS, "  gloo_algos->Allreduce(buffer_data, num_elements, glooOp);\n", """\
  if (!(glooOp == ReduceOp::SUM && SumIn16Bits(gloo_context, entries, buffer_data, num_elements))) {
    gloo_algos->Allreduce(buffer_data, num_elements, glooOp);
  }
"""),
    # Where a set of ranks has not the same local ranks on each host, those that were to be
    # connected looked for each other under different names, and Horovod did not start.
    (f"{CONTEXT}.cc", "std::to_string(local_rank) + process_set_suffix",
     "std::to_string(global_context_cross_ranks.front()) + process_set_suffix"),
    # A tensor that was reduced in place was copied onto itself.
    (OPERATIONS, """\
    std::memcpy(buffer_data, first_entry.tensor->data(),
                (size_t)first_entry.tensor->size());
    fused_input_data = buffer_data;
""", """\
    if (buffer_data != first_entry.tensor->data()) {
      std::memcpy(buffer_data, first_entry.tensor->data(),
                  (size_t)first_entry.tensor->size());
    }
    fused_input_data = buffer_data;
"""),
    # Where a rank's Horovod had ended in an error, its connections stayed open until the program
    # ended, and others could wait for an answer of it until then. They are not reset where a job
    # ends in order: others may still read what came last.
    ("horovod/common/operations.cc", """\
        << "Horovod background loop uncaught exception: " << ex.what();
""", """\
        << "Horovod background loop uncaught exception: " << ex.what();
#if HAVE_GLOO
    if (state.control_operation == LibType::GLOO) {
      for (auto id : state.process_set_table.Ids()) {
        const auto& gloo = state.process_set_table.Get(id).gloo_context;
        if (gloo.shared) {
          gloo.shared->Break();
        }
        for (const auto& context : {gloo.ctx, gloo.local_ctx, gloo.cross_ctx}) {
          if (context) {
            context->closeConnections();
          }
        }
      }
    }
#endif
"""),
    # The end of further sets of processes is agreed on over these: the program was aborted.
    ("horovod/common/operations.cc", """\
    horovod_global.process_set_table.Finalize(global_gloo_context,
                                              SHUT_DOWN_ERROR);
""", """\
    try {
      horovod_global.process_set_table.Finalize(global_gloo_context,
                                                SHUT_DOWN_ERROR);
    } catch (const std::exception& ex) {
      LOG(DEBUG) << "Process sets end without the others': " << ex.what();
    }
"""),
    # Before a rank connects to another it waits for Gloo's thread, which sleeps for 10 ms; now
    # that is woken.
    (f"{GLOO}/transport/tcp/loop.cc", "    cv_.wait(lock);\n",
     "    defer([] {});\n    cv_.wait(lock);\n"),
    (f"{GLOO}/transport/tcp/loop.cc", "    cv_.notify_all();\n",
     "    std::unique_lock<std::mutex>(m_).unlock();  // who is about to wait, waits\n"
     "    cv_.notify_all();\n"),
]  # fmt: skip
# So that g++ 14 and newer compile it, which look into templates that nothing uses: what is built is
# the same, and so is PATCH.
FAULTS = [
    ("third_party/flatbuffers/include/flatbuffers/stl_emulation.h", """\
      FLATBUFFERS_NOEXCEPT {
    data_ = other.data_;
    count_ = other.count_;
  }
""", "      FLATBUFFERS_NOEXCEPT = delete;  // of a constant\n"),
]  # fmt: skip


def patch(source: Path) -> None:
    """Make the changes of PATCHES and FAULTS in Horovod's sources."""
    for header in HEADERS:
        shutil.copy(header, source / "horovod/common/gloo")
    for name, old, new in PATCHES + FAULTS:
        file = source / name
        text = file.read_text()
        if text.count(old) != 1:
            raise InstallError(f"{name} of {source.name} has changed: PATCHES does not fit it")
        file.write_text(text.replace(old, new))
