// SPDX-License-Identifier: Apache-2.0
// The queue of the PyTorch backend, which needs no PyTorch.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "python/src/task_queue.h"
#include "tests/support/catch.h"

namespace {

class Task;
using Queue = ddp_torch::TaskQueue<std::shared_ptr<Task>>;

// As an operation of the backend: it owns the queue until it is complete.
class Task {
 public:
  Task(std::shared_ptr<Queue> queue, std::function<void()> run, std::function<void()> completed)
      : queue_(std::move(queue)), run_(std::move(run)), completed_(std::move(completed)) {}

  void Wait() { done_.get_future().wait(); }

 private:
  friend Queue;
  bool HasCall() const { return false; }
  void Issue() { issued_ = true; }
  void Execute() { run_(); }
  void Complete() {
    completed_();
    queue_ = nullptr;
    done_.set_value();
  }

  bool issued_ = false;
  bool executed_ = false;
  std::shared_ptr<Queue> queue_;
  std::function<void()> run_, completed_;
  std::promise<void> done_;
};

std::shared_ptr<Task> Submit(
    const std::shared_ptr<Queue>& queue, std::function<void()> run, std::function<void()> completed = [] {}) {
  auto task = std::make_shared<Task>(queue, std::move(run), std::move(completed));
  queue->Submit(task, false);
  return task;
}

}  // namespace

TEST_CASE("Tasks run in their order, and stopping finishes them", "[torch_queue]") {
  auto queue = std::make_shared<Queue>();
  std::string order;
  for (const char* name : {"a", "b", "c"}) Submit(queue, [&order, name] { order += name; });
  auto now = std::make_shared<Task>(
      queue, [&] { order += "d"; }, [] {});
  queue->Submit(now, true);
  CHECK(order == "abcd");
  Submit(queue, [&] { order += "e"; });
  queue->Stop();
  CHECK(order == "abcde");
}

// The thread goes on with the queue after the task that owned it.
TEST_CASE("The queue's last owner may be a task that its thread completes", "[torch_queue]") {
  for (int i = 0; i < 200; ++i) {
    auto queue = std::make_shared<Queue>();
    std::promise<void> released;
    const auto task = Submit(queue, [&] { released.get_future().wait(); });
    queue = nullptr;
    released.set_value();
    task->Wait();
  }
}

// A backend that is destroyed by what a program has tied to a future: its tasks use it.
TEST_CASE("A queue that is stopped by its own thread finishes its tasks first", "[torch_queue]") {
  for (int i = 0; i < 50; ++i) {
    struct Backend {
      ~Backend() {
        queue->Stop();
        alive->store(false);
      }
      std::shared_ptr<Queue> queue = std::make_shared<Queue>();
      std::shared_ptr<std::atomic<bool>> alive = std::make_shared<std::atomic<bool>>(true);
    };
    auto backend = std::make_shared<Backend>();
    const auto alive = backend->alive;
    int after_its_end = 0;
    std::promise<void> released;
    std::vector<std::shared_ptr<Task>> tasks = {Submit(
        backend->queue, [&] { released.get_future().wait(); }, [&] { backend = nullptr; })};
    for (int k = 0; k < 3; ++k) {
      tasks.push_back(Submit(backend->queue, [&] { after_its_end += alive->load() ? 0 : 1; }));
    }
    released.set_value();
    for (const auto& task : tasks) task->Wait();
    CHECK(after_its_end == 0);
  }
}

// glibc waits for the threads that wait at a condition variable before it is destroyed; the child has none.
TEST_CASE("A child of fork destroys its copy of a queue without waiting", "[torch_queue]") {
  auto queue = std::make_shared<Queue>();
  Submit(queue, [] {})->Wait();
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    queue = nullptr;
    _exit(7);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 7));
}
