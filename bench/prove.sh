#!/usr/bin/env bash
# Everything that is claimed of GPUs, one step after the other, on a machine with two: about 30 minutes with warm kernels.
#
#   bench/prove.sh OUT          # OUT: folder for results and logs; SGLang, deep_ep and this package are installed
#
# Steps do not overlap: a second process on the machine doubles the times of the first.
set -uo pipefail
out=${1:?usage: bench/prove.sh OUT}
mkdir -p "$out"
export SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD=${SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD-0}
python=${PYTHON:-python3}
"$python" "$(dirname "$0")/shape.py" "$out/shape" || exit 1

model=(--model-path "$out/shape" --load-format dummy --grammar-backend none --disable-decode-cuda-graph
       --dsa-decode-backend flashmla_sparse --watchdog-timeout 900)
serve=("${model[@]}" --skip-tokenizer-init --max-running-requests 64 --mem-fraction-static 0.5)
ladder=(--cuda-graph-bs-prefill 64 256 512 1024)
two=(--tp 2 --dp 2 --enable-dp-attention --moe-a2a-backend deepep --chunked-prefill-size 4096)
failed=()

step() {  # NAME SECONDS COMMAND...: its output goes to OUT/NAME.txt
    local name=$1 seconds=$2
    shift 2
    echo "== $name"
    timeout "$seconds" "$python" -m sglang_bcg_dsa.cli "$@" > "$out/$name.txt" 2>&1 || failed+=("$name")
    grep -v "it/s\|TP[01]\]" "$out/$name.txt" | tail -40 | cut -c1-160
}

step speed 400 bench --tokens 64,256,512,1024,2500 --save "$out/speed.json" \
    --check 63,64,65,255,256,257,1000,1023,1024,100+28,700+200+30,2500 --profile 256 -- "${model[@]}" "${two[@]}" \
    --chunked-prefill-size 8192 --mem-fraction-static 0.55 --max-running-requests 16 --plugins bcg_dsa \
    --cuda-graph-bs-prefill 64 256 512 1024 2560
step ladder 400 bench --tokens 64,1024 --save "$out/ladder.json" -- "${model[@]}" "${two[@]}" --chunked-prefill-size 4096 \
    --mem-fraction-static 0.55 --max-running-requests 16 --plugins bcg_dsa
step auto 500 compare --requests 100 --keep "$out/auto" -- "${serve[@]}" "${two[@]}" "${ladder[@]}" --deepep-mode auto
step normal 500 compare --requests 100 --keep "$out/normal" -- "${serve[@]}" "${two[@]}" "${ladder[@]}" --deepep-mode normal
step one 400 compare --requests 100 --keep "$out/one" -- "${serve[@]}" "${ladder[@]}" --chunked-prefill-size 2048

"$python" "$(dirname "$0")/shape.py" "$out/shape4" --family dsv4 || exit 1
export SGLANG_DSV4_FP4_EXPERTS=0  # its experts are FP8 here; SGLang takes them for FP4 where no checkpoint says so
four=(--model-path "$out/shape4" --load-format dummy --grammar-backend none --disable-decode-cuda-graph --watchdog-timeout 900
      --max-total-tokens 1048576 --max-running-requests 16 --mem-fraction-static 0.5 --chunked-prefill-size 4096 --plugins bcg_dsa)
step dsv4 400 bench --tokens 64,256,1024,2048 --check 63,64,100+28,1024,2000+1000,2048/64,8192/1000 --save "$out/dsv4.json" \
    -- "${four[@]}" --cuda-graph-bs-prefill 64 256 1024 2048
step dsv4-two 500 bench --tokens 64,256,1024 --check 63,64,100+28,1024,2000+1000,8192/1000 --save "$out/dsv4-two.json" \
    -- "${four[@]}" --cuda-graph-bs-prefill 64 256 1024 2048 --tp 2 --dp 2 --enable-dp-attention --moe-a2a-backend deepep
step dsv4-http 500 compare --requests 40 --keep "$out/dsv4-http" -- "${four[@]}" --skip-tokenizer-init --enable-mixed-chunk \
    --cuda-graph-bs-prefill 64 256 1024 2048 --tp 2 --dp 2 --enable-dp-attention --moe-a2a-backend deepep

echo "failed: ${failed[*]:-none}"
[ ${#failed[@]} -eq 0 ]
