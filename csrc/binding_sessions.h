// Programs by their handles. Only for bindings.

#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "checks.h"
#include "program_runner.h"

namespace plait {

// A runner, the tensors that its weights lie in, and those of the step that it is at.
struct Session {
  // Writes the rows of tokens, dense and of the program's type, as register 0 takes them. Set where
  // steps may name tokens instead of bringing their rows.
  std::function<void(const int64_t* token_ids, size_t count, void* rows)> embed;
  int64_t num_embeddings = 0;
  std::vector<char> embedded;  // rows of the step that it is at
  std::vector<torch::stable::Tensor> weights;
  std::unique_ptr<ProgramRunner> runner;
  std::vector<torch::stable::Tensor> step;
  std::mutex in_use;
};

// What Python knows by a number. Never destroyed: a daemon thread may be within a step when the
// process ends.
template <class T>
class Handles {
 public:
  explicit Handles(const char* what) : what_(what) {}

  int64_t add(std::shared_ptr<T> session) {
    const std::lock_guard<std::mutex> lock(mutex_);
    sessions_[++last_] = std::move(session);
    return last_;
  }
  std::shared_ptr<T> find(int64_t handle, const char* op) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = sessions_.find(handle);
    check(found != sessions_.end(), op, "there is no ", what_, " ", handle);
    return found->second;
  }
  void remove(int64_t handle) {
    std::shared_ptr<T> last;  // freed behind the lock
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = sessions_.find(handle);
    if (found == sessions_.end()) return;
    last = std::move(found->second);
    sessions_.erase(found);
  }
  int64_t count() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int64_t>(sessions_.size());
  }

 private:
  const char* const what_;
  std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<T>> sessions_;
  int64_t last_ = 0;
};

inline Handles<Session>& sessions() {
  static auto* const all = new Handles<Session>("program");
  return *all;
}

// A session, for one caller at a time.
class InUse {
 public:
  InUse(int64_t handle, const char* op)
      : session_(sessions().find(handle, op)), lock_(session_->in_use, std::try_to_lock) {
    check(lock_.owns_lock(), op, "program ", handle, " is in use by another thread");
  }
  Session* operator->() const { return session_.get(); }
  Session* get() const { return session_.get(); }
  ProgramRunner& runner() const { return *session_->runner; }

 private:
  std::shared_ptr<Session> session_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace plait
