// Command bench creates topics, preloads them, offers an open-loop load and
// checks what came out. Values are 200 bytes: "<seq per key>|<due time, us>|<i>|xxx",
// with -json the same between quotes (a JSON string, for peers that read JSON only).
// The load is in load.go.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"os"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

var (
	brokers = flag.String("brokers", "localhost:9092", "bootstrap servers")
	topic   = flag.String("topic", "", "topic (input)")
	out     = flag.String("out", "", "output topic")
	parts   = flag.Int("parts", 8, "partitions")
	n       = flag.Int("n", 0, "messages")
	keys    = flag.Int("keys", 1000, "distinct keys")
	rate    = flag.Float64("rate", 5000, "messages per second offered")
	zipfS   = flag.Float64("zipf", 0, "key number r is 1/r^s as likely as the first; 0: all are as likely")
	rotate  = flag.Int("rotate", 0, "1: keys take turns instead of being drawn")
	dur     = flag.Duration("dur", 20*time.Second, "how long to offer load")
	drain   = flag.Duration("drain", 15*time.Second, "longest wait for outputs after the load ends")
	group   = flag.String("group", "", "consumer group to inspect")
	asJSON  = flag.Bool("json", false, "values are JSON strings")
	base    = flag.Int("base", 0, "first event id (the per-key sequence restarts at 0 with a new key prefix)")
	failPct = flag.Int("fail", 0, "percent of event ids that the peer lets fail; the latency of the others is also reported apart")
	window  = flag.Duration("window", 0, "the middle of the load that is also reported apart")
	stuck   = flag.Float64("stuck", 0, "messages per second of one more key during the window, to fail until it is over")
)

func die(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func mix(x uint64) uint64 { // splitmix64: uniform, repeatable choice of keys
	x += 0x9e3779b97f4a7c15
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9
	x = (x ^ (x >> 27)) * 0x94d049bb133111eb
	return x ^ (x >> 31)
}

type source struct {
	seq    []int
	shares []float64 // of the first k+1 keys together; empty when all are as likely
}

func newSource() *source {
	s := &source{seq: make([]int, *keys)}
	if *zipfS > 0 {
		sum := 0.0
		for k := range s.seq {
			sum += math.Pow(float64(k+1), -*zipfS)
			s.shares = append(s.shares, sum)
		}
	}
	return s
}

func (s *source) record(topic string, i int, due time.Time) *kgo.Record {
	k := int(mix(uint64(i)) % uint64(len(s.seq)))
	if len(s.shares) > 0 {
		at := float64(mix(uint64(i))>>11) / (1 << 53) * s.shares[len(s.shares)-1]
		k = min(sort.SearchFloat64s(s.shares, at), len(s.seq)-1)
	}
	if *rotate != 0 {
		k = (i - *base) % len(s.seq)
	}
	r := record(topic, fmt.Appendf(nil, "s%d-%d", *base, k), s.seq[k], i, due)
	s.seq[k]++
	return r
}

func record(topic string, key []byte, seq, i int, due time.Time) *kgo.Record {
	v := make([]byte, 0, 200)
	if *asJSON {
		v = append(v, '"')
	}
	v = strconv.AppendInt(v, int64(seq), 10)
	v = append(v, '|')
	v = strconv.AppendInt(v, due.UnixMicro(), 10)
	v = append(v, '|')
	v = strconv.AppendInt(v, int64(i), 10)
	v = append(v, '|')
	for len(v) < 200 {
		v = append(v, 'x')
	}
	if *asJSON {
		v[199] = '"'
	}
	return &kgo.Record{Topic: topic, Key: key, Value: v,
		Headers: []kgo.RecordHeader{{Key: "event-id", Value: strconv.AppendInt(nil, int64(i), 10)}}}
}

func producer(linger time.Duration) *kgo.Client {
	cl, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(*brokers, ",")...), kgo.ProducerLinger(linger),
		kgo.ProducerBatchCompression(kgo.Lz4Compression()), kgo.MaxBufferedRecords(200000))
	die(err)
	return cl
}

type order struct {
	last                        map[string]int
	got, violations, duplicates int
}

// see counts a record whose sequence number is not the next one of its key.
func (o *order) see(r *kgo.Record) (due int64, event string) {
	a := strings.SplitN(strings.TrimPrefix(string(r.Value), "\""), "|", 4)
	seq, _ := strconv.Atoi(a[0])
	due, _ = strconv.ParseInt(a[1], 10, 64)
	next := o.last[string(r.Key)]
	o.got++
	switch {
	case seq == next:
		o.last[string(r.Key)] = seq + 1
	case seq < next:
		o.duplicates++ // seen before, or arrived late: late ones were counted as a skip already
	default:
		o.violations++
		o.last[string(r.Key)] = seq + 1
	}
	return due, a[2]
}

func ends(cl *kgo.Client, t string) map[int32]kadm.ListedOffset {
	e, err := kadm.NewClient(cl).ListEndOffsets(context.Background(), t)
	die(err)
	return e[t]
}

func reader(t string, at kgo.Offset) *kgo.Client {
	cl, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(*brokers, ",")...), kgo.ConsumeTopics(t), kgo.ConsumeResetOffset(at))
	die(err)
	return cl
}

// readerFromNow reads what is written from this moment on: the ends are asked for before it returns.
func readerFromNow(t string) *kgo.Client {
	asker := producer(0)
	defer asker.Close()
	at := map[int32]kgo.Offset{}
	for p, e := range ends(asker, t) {
		at[p] = kgo.NewOffset().At(e.Offset)
	}
	cl, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(*brokers, ",")...), kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{t: at}))
	die(err)
	return cl
}

func print(v map[string]any) { b, _ := json.Marshal(v); fmt.Println(string(b)) }

func main() {
	cmd := os.Args[1]
	die(flag.CommandLine.Parse(os.Args[2:]))
	ctx := context.Background()
	switch cmd {
	case "create":
		cl := producer(0)
		for _, t := range strings.Split(*topic, ",") {
			_, err := kadm.NewClient(cl).CreateTopic(ctx, int32(*parts), 1, nil, t)
			die(err)
			for { // until every partition has a leader that answers
				l, err := kadm.NewClient(cl).ListEndOffsets(ctx, t)
				if err == nil && l.Error() == nil && len(l[t]) == *parts {
					break
				}
				time.Sleep(10 * time.Millisecond)
			}
		}
	case "delete":
		cl := producer(0)
		_, err := kadm.NewClient(cl).DeleteTopics(ctx, strings.Split(*topic, ",")...)
		die(err)
	case "preload":
		cl := producer(20 * time.Millisecond)
		s := newSource()
		t0 := time.Now()
		for i := 0; i < *n; i++ {
			cl.Produce(ctx, s.record(*topic, *base+i, time.Now()), func(_ *kgo.Record, err error) { die(err) })
		}
		die(cl.Flush(ctx))
		print(map[string]any{"preloaded": *n, "per_s": int(float64(*n) / time.Since(t0).Seconds())})
	case "group":
		cl := producer(0)
		got, err := kadm.NewClient(cl).FetchOffsets(ctx, *group)
		die(err)
		var end, committed int64
		for p, e := range ends(cl, *topic) {
			end += e.Offset
			if o, ok := got.Lookup(*topic, p); ok && o.At > 0 {
				committed += o.At
			}
		}
		print(map[string]any{"end": end, "committed": committed})
	case "check":
		cl := reader(*out, kgo.NewOffset().AtStart())
		var total int64
		for _, e := range ends(cl, *out) {
			total += e.Offset
		}
		o := &order{last: map[string]int{}}
		for int64(o.got) < total {
			cl.PollFetches(ctx).EachRecord(func(r *kgo.Record) { o.see(r) })
		}
		print(map[string]any{"out": o.got, "want": *n, "order_violations": o.violations, "duplicates": o.duplicates, "keys": len(o.last)})
	case "load":
		load(ctx)
	default:
		die(fmt.Errorf("unknown command %s", cmd))
	}
}
