/* Two ranks that send each other messages through two rings (csrc/messages/ring.h, csrc/messages/messages.cpp): short
 * ones in a frame, long ones as an offer, its acceptance in the other ring, and pieces. A rank that
 * has nothing to do sleeps; it is woken only where it has counted itself asleep, and for room in its
 * ring only where it has asked for that.
 *
 * Checked: frames arrive whole, once and in order; every rank gets all its messages, and never
 * sleeps for ever. A rank whose peer has died takes what the peer had sent, and ends.
 *
 *   MESSAGES     from rank 0 to rank 1
 *   ANSWERS      from rank 1 to rank 0
 *   PLACES       frames that a ring holds
 *   DEATHS       ranks may die
 *   EARLY_TAIL   a frame is published before it is written: must fail
 *   EARLY_HEAD   its place is given back before it is read: must fail
 *   SILENT       nobody is told of room in a ring: must fail
 *   NO_LOOK      a rank that has asked for room does not look again: must fail
 *   LATE         a rank counts itself asleep after it has looked at the rings: must fail
 */
#ifndef MESSAGES
#define MESSAGES 2
#endif
#ifndef ANSWERS
#define ANSWERS 1
#endif
#ifndef PLACES
#define PLACES 2
#endif

#define PEER (1 - me)
#define EAGER 0
#define OFFER 1
#define ACCEPT 2
#define PIECE 3
#define FRAME(kind, number) ((kind) * 8 + (number))
#define NUMBER(frame) ((frame) % 8)
#define PIECES 2  /* of a long message */

/* Of the ring that a rank writes. */
byte tail[2], head[2];
byte cells[2 * PLACES];  /* a frame, written whole; 0 meanwhile */
bool starved[2];

bool rung[2];  /* the futex of a rank has changed since the rank looked at it */
bool sleepers[2], asleep[2], gone[2];

#define CELL(of, at) cells[(of) * PLACES + (at) % PLACES]
#define ROOM (tail[me] - head[me] < PLACES)
#define FILLED (head[PEER] != tail[PEER])
#define TO_SEND (me == 0 -> MESSAGES : ANSWERS)
#define TO_RECEIVE (me == 0 -> ANSWERS : MESSAGES)
#define BACKLOG (due != 0 || left != 0 || (sent < TO_SEND && offered == 0))

#ifdef DEATHS
#define MAY_DIE if :: true :: goto died fi
#else
#define MAY_DIE skip
#endif

inline wake() {
	if
	:: sleepers[PEER] -> atomic { rung[PEER] = true; asleep[PEER] = false }
	:: else
	fi
}

inline push(frame) {
#ifdef EARLY_TAIL
	tail[me]++;
	CELL(me, tail[me] - 1) = 0; CELL(me, tail[me] - 1) = frame;
#else
	CELL(me, tail[me]) = 0; MAY_DIE; CELL(me, tail[me]) = frame; MAY_DIE;
	tail[me]++;
#endif
	MAY_DIE;
	wake()
}

inline take() {
	d_step {
		frame = CELL(PEER, head[PEER]);
		assert(frame != 0);
		place = head[PEER]
	};
#ifdef EARLY_HEAD
	head[PEER]++;
#endif
	MAY_DIE;  /* reading takes time */
	d_step {
		assert(CELL(PEER, place) == frame);
		if
		:: frame / 8 == EAGER -> seen++; received++; assert(NUMBER(frame) == seen)
		:: frame / 8 == OFFER -> seen++; due = seen; missing = PIECES; assert(NUMBER(frame) == seen)
		:: frame / 8 == ACCEPT -> left = PIECES; assert(NUMBER(frame) == offered)
		:: frame / 8 == PIECE ->
			assert(missing > 0);
			missing--;
			if :: missing == 0 -> received++ :: else fi
		fi
	};
#ifdef EARLY_HEAD
	frame = 0; place = 0;
#else
	d_step { CELL(PEER, place) = 0; frame = 0; place = 0; head[PEER]++ };  /* nobody reads it again */
#endif
	MAY_DIE;
#ifndef SILENT
	if :: starved[PEER] -> wake() :: else fi
#endif
}

inline sleep_a_while() {
	starved[me] = BACKLOG;
	if
#ifndef NO_LOOK
	:: BACKLOG && ROOM
#endif
	:: else ->
#ifdef LATE
		rung[me] = false;
		if
		:: FILLED
		:: else -> sleepers[me] = true; atomic { asleep[me] = !rung[me] }
		fi;
#else
		sleepers[me] = true;
		rung[me] = false;
		if
		:: FILLED
#ifndef NO_LOOK
		:: BACKLOG && ROOM
#endif
		:: else -> atomic { asleep[me] = !rung[me] }
		fi;
#endif
		/* The end of a process wakes those that have a link to it. */
		!asleep[me] || gone[PEER];
		d_step { asleep[me] = false; sleepers[me] = false; rung[me] = false }
	fi
}

active [2] proctype Rank() {
	byte me = _pid, sent, seen, received, offered, left, due, missing, frame, place;
	do
	:: sent == TO_SEND && received == TO_RECEIVE && offered == 0 && due == 0 -> goto finished
	:: gone[PEER] && !FILLED -> goto finished
	:: else ->
		if
		:: due != 0 && ROOM -> push(FRAME(ACCEPT, due)); due = 0
		:: left != 0 && ROOM ->
			push(FRAME(PIECE, offered));
			d_step { left--; if :: left == 0 -> offered = 0 :: else fi }
		:: sent < TO_SEND && offered == 0 && ROOM ->
			sent++;
			if
			:: push(FRAME(EAGER, sent))
			:: offered = sent; push(FRAME(OFFER, sent))
			fi
		:: FILLED -> take()
		:: !FILLED && !(BACKLOG && ROOM) -> sleep_a_while()
		fi
	od;
died:
	gone[me] = true;
finished:
	skip
}
