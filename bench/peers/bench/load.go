package main

import (
	"context"
	"fmt"
	"hash/fnv"
	"sort"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// failUntil is the header of the extra key's messages: unix time in us until which the peer lets them fail.
const failUntil = "fail-until"

// sample is one result: when its message was due and when it arrived (us), and its event id.
type sample struct {
	due, at int64
	event   string
}

func (s sample) fails() bool {
	h := fnv.New32a()
	h.Write([]byte(s.event))
	return int(h.Sum32()%100) < *failPct
}

// results reads the output topic while the load runs. The fields are the reader's until done is closed.
type results struct {
	order, stuckOrder order
	samples, stuck    []sample
	got               atomic.Int64 // without the extra key; read by the sender
	lastAt            int64
	done              chan struct{}
}

func (s *results) read(ctx context.Context, cl *kgo.Client, want, wantStuck int) {
	defer close(s.done)
	pre, extra := fmt.Sprintf("s%d-", *base), stuckKey()
	for (s.order.got < want || s.stuckOrder.got < wantStuck) && ctx.Err() == nil {
		fs := cl.PollFetches(ctx)
		now := time.Now().UnixMicro()
		fs.EachRecord(func(r *kgo.Record) {
			key := string(r.Key)
			if key == extra {
				due, event := s.stuckOrder.see(r)
				s.stuck = append(s.stuck, sample{due, now, event})
			} else if strings.HasPrefix(key, pre) {
				due, event := s.order.see(r)
				s.samples = append(s.samples, sample{due, now, event})
				s.lastAt = now
			}
		})
		s.got.Store(int64(s.order.got))
	}
}

func stuckKey() string { return fmt.Sprintf("s%d-stuck", *base) }

// percentiles of the latency in ms of the samples that pass.
func percentiles(samples []sample, pass func(sample) bool) map[string]any {
	lats := make([]float64, 0, len(samples))
	for _, s := range samples {
		if pass(s) {
			lats = append(lats, float64(s.at-s.due)/1000)
		}
	}
	sort.Float64s(lats)
	q := func(x float64) any {
		if len(lats) == 0 {
			return nil
		}
		return float64(int(lats[min(len(lats)-1, int(float64(len(lats))*x))]*10)) / 10
	}
	return map[string]any{"count": len(lats), "p50": q(.5), "p95": q(.95), "p99": q(.99), "max": q(1)}
}

func load(ctx context.Context) {
	want, wantStuck := int(*rate*dur.Seconds()), int(*stuck*window.Seconds())
	s := &results{samples: make([]sample, 0, want), done: make(chan struct{})}
	s.order.last, s.stuckOrder.last = map[string]int{}, map[string]int{}
	rctx, cancel := context.WithCancel(ctx)
	go s.read(rctx, readerFromNow(*out), want, wantStuck)
	time.Sleep(500 * time.Millisecond)
	p := producer(time.Millisecond)
	src := newSource()
	p.ProduceSync(ctx) // connect before the clock starts
	t0 := time.Now()
	from := t0.Add((*dur - *window) / 2) // of the window
	until := from.Add(*window)
	sent := func(_ *kgo.Record, err error) { die(err) }
	var slip time.Duration
	var gotAtHalf int64
	for i, j := 0, 0; i < want || j < wantStuck; {
		el := time.Since(t0)
		if gotAtHalf == 0 && el > *dur/2 {
			gotAtHalf = s.got.Load()
		}
		for ; i < want; i++ {
			due := time.Duration(float64(i) / *rate * 1e9)
			if due > el {
				break
			}
			if l := time.Since(t0) - due; l > slip {
				slip = l
			}
			p.Produce(ctx, src.record(*topic, *base+i, t0.Add(due)), sent)
		}
		for ; j < wantStuck; j++ {
			due := from.Add(time.Duration(float64(j) / *stuck * 1e9))
			if time.Now().Before(due) {
				break
			}
			r := record(*topic, []byte(stuckKey()), j, *base+want+j, due)
			r.Headers = append(r.Headers, kgo.RecordHeader{Key: failUntil, Value: strconv.AppendInt(nil, until.UnixMicro(), 10)})
			p.Produce(ctx, r, sent)
		}
		time.Sleep(time.Millisecond)
	}
	sendEnd := time.Now()
	gotAtEnd := s.got.Load()
	die(p.Flush(ctx))
	select {
	case <-s.done:
	case <-time.After(*drain):
	}
	cancel()
	<-s.done

	answer := percentiles(s.samples, func(sample) bool { return true })
	for k, v := range map[string]any{"rate": *rate, "sent": want, "got": s.order.got,
		"backlog_half": int64(want/2) - gotAtHalf, "backlog_end": int64(want) - gotAtEnd,
		"drain_s": float64(s.lastAt-sendEnd.UnixMicro()) / 1e6, "gen_slip_ms": slip.Milliseconds(),
		"order_violations": s.order.violations, "duplicates": s.order.duplicates} {
		answer[k] = v
	}
	if *failPct > 0 {
		answer["clean"] = percentiles(s.samples, func(x sample) bool { return !x.fails() })
	}
	if *window > 0 {
		a, b := from.UnixMicro(), until.UnixMicro()
		in := percentiles(s.samples, func(x sample) bool { return a <= x.due && x.due < b })
		arrived := 0
		for _, x := range s.samples {
			if a <= x.at && x.at < b {
				arrived++
			}
		}
		in["per_s"] = float64(arrived) / window.Seconds()
		answer["window"] = in
	}
	if wantStuck > 0 {
		x := percentiles(s.stuck, func(sample) bool { return true })
		early := 0 // results that came before they could: the key was not stuck
		for _, r := range s.stuck {
			if r.at < until.UnixMicro() {
				early++
			}
		}
		x["sent"], x["got"], x["early"] = wantStuck, s.stuckOrder.got, early
		x["order_violations"], x["duplicates"] = s.stuckOrder.violations, s.stuckOrder.duplicates
		answer["stuck"] = x
	}
	print(answer)
}
