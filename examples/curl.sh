#!/bin/sh
# Every endpoint with curl. Run `plait serve` first, then: sh examples/curl.sh
# Prints the JSON of each answer; the stream comes as lines "data: {…}" and ends in [DONE].
# Another server: sh examples/curl.sh http://host:port
set -eu
server="${1:-http://127.0.0.1:8000}"
post() {
    curl --fail-with-body --silent --show-error --no-buffer "$server$1" \
        -H 'Content-Type: application/json' -d "$2"
    echo
}

curl --fail --silent "$server/v1/models" && echo
curl --fail --silent "$server/v1/lora_adapters" && echo

post /v1/completions \
    '{"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}'

post /v1/completions \
    '{"prompt": ["One, two,", "Red, green,"], "max_tokens": 4, "temperature": 0, "logprobs": 2}'

post /v1/chat/completions \
    '{"messages": [{"role": "user", "content": "Name three rivers."}], "max_tokens": 24, "seed": 7}'

post /v1/chat/completions \
    '{"messages": [{"role": "user", "content": "Count to five."}], "max_tokens": 24, "stream": true,
      "stream_options": {"include_usage": true}}'

post /v1/chat/completions \
    '{"model": "tone", "max_tokens": 24, "temperature": 0,
      "messages": [{"role": "user", "content": "Rewrite this politely: send me the invoice now"}]}'

post /tokenize '{"prompt": "Hello, world"}'
post /detokenize '{"tokens": [19556, 28, 905]}'

curl --fail --silent "$server/health" && echo
curl --fail --silent "$server/version" && echo
curl --fail --silent "$server/metrics" | grep vllm:num_requests
